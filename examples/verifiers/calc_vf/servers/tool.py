from __future__ import annotations

import verifiers.v1 as vf


class CalcState(vf.State):
    calls: int = 0


class CalcToolset(vf.Toolset[vf.ToolsetConfig, CalcState]):
    TOOL_PREFIX = "calc"

    @vf.tool
    def add(self, left: int, right: int) -> str:
        """Add two numbers."""
        self.state.calls += 1
        return str(left + right)


if __name__ == "__main__":
    CalcToolset.run()
