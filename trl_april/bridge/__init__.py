"""Everything between TRL's trainer and the other rooms: rows, prompts, rewards, the tool loop, batches.

Only this room and `trainer.py` name internals of TRL's trainer; `contract.toml` lists them. The other rooms get plain
values and callables.
"""
