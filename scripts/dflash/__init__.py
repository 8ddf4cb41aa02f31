"""Training of DFlash block-diffusion drafters; the command line is `scripts/train_dflash.py`."""
