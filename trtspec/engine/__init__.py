"""The loop and its parts: requests, scheduler, batches, lifecycle."""
