"""What runs on a machine that is offered: its facts, the folder of a model, the processes of ranks."""
