"""Find which of timm's pretrained networks is the fastest for its published accuracy on this CPU."""
