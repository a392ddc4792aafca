"""How it runs: threads, waking, forks, and steps that know neither threads nor asyncio."""
