"""Messages between two ranks, as far as they are the same whatever carries them."""
