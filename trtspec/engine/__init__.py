"""The loop and what it needs: requests, scheduler, batches, lifecycle."""
