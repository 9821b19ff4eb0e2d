"""Images with a class (`sources`) and the order in which they are trained on (`order`)."""
