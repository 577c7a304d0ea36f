"""The ops of embedding bags on GPUs."""
