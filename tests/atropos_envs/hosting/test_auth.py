"""An environment sends the run's key to its own servers, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

from atropos_api.auth import Settings
from atropos_common.net.http import allowed_hosts, run_key
from atropos_common.system.run_dir import ENV_RUN_KEY
from atropos_envs import EnvFault
from atropos_envs.arithmetic_server import ArithmeticEnv
from atropos_envs.hosting.run_key import with_run_key
from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.atropos_envs.support import make_env, run_api

TOKEN = "a-token-of-the-run"
KEY = run_key(TOKEN)
OWN = "10.77.0.1"
GROUP: dict[str, Any] = {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [1.0, 0.0] * 2}


def test_the_key_is_in_an_address_only_where_a_request_is_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATROPOS_ENGINE_URLS", f"http://{OWN}:9001/v1")
    config = BaseEnvConfig(rollout_server_url=f"http://{OWN}:8000")
    own = APIServerConfig(base_url=f"http://{OWN}:9001/v1", model_name="m", api_key="local")
    judge = APIServerConfig(base_url="https://judge.example/v1", model_name="m", api_key="theirs")
    keyed, servers = with_run_key(config, [own, judge], KEY)
    assert f"{keyed.rollout_server_url}/info" == f"http://atropos:{KEY}@{OWN}:8000/info"
    assert [server.api_key for server in servers] == [KEY, "theirs"]
    for shown in (
        str(keyed.rollout_server_url),
        json.dumps(keyed.model_dump(mode="json")),
        keyed.model_dump_json(),
        repr(keyed),
    ):
        assert KEY not in shown and OWN in shown
    assert with_run_key(config, [own], "") == (config, [own])


@pytest.mark.parametrize("has_key", [True, False])
async def test_an_environment_passes_the_auth_middleware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_key: bool
) -> None:
    """Each call that atroposlib makes of run-api, on the real one."""
    save_model(build_tiny_model(), tmp_path / "model")
    auth = Settings(frozenset(), allowed_hosts("127.0.0.1"), 1 << 20, TOKEN, frozenset({KEY}))
    if has_key:
        monkeypatch.setenv(ENV_RUN_KEY, KEY)
    async with run_api(auth=auth) as url:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as trainer:
            registration = {
                "wandb_group": "",
                "wandb_project": "",
                "batch_size": 8,
                "max_token_len": 64,
                "checkpoint_dir": "",
                "save_checkpoint_interval": 1,
                "starting_step": 0,
                "num_steps": 10,
            }
            await trainer.post(f"{url}/register", json=registration)
            await trainer.get(f"{url}/batch")
        env: Any = make_env(ArithmeticEnv, tmp_path, f"{url}/v1", rollout_server_url=url)
        if not has_key:
            with pytest.raises(EnvFault, match="refused the registration"):
                await env.register_env()
            return
        await env.register_env()
        env.items = iter(())
        await env.get_server_info()
        await env.get_status()
        await env._send_scored_data_to_api(GROUP)
        await env.get_status()
        assert env.status_dict["queue_size"] == 1
        await env._registration.disconnect()
        await env._registration.close()
