"""How experts compute: slots in memory, the arithmetic on them, and the engine that serves one event after another."""
