"""The DFlash drafter: shape, network, anchors and masks, loss, checkpoints in z-lab's layout."""
