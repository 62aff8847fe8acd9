"""How results reach people and pipes."""
