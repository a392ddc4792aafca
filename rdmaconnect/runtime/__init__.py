"""How it runs: threads, waking, forks, and procedures that know neither threads nor asyncio."""
