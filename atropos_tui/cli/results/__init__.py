"""Commands about what runs measured: report, compare, sweep, bundle; and the MCP server."""
