"""All that outlives a step: global KV pool, window ring, pending pair halves, replay plan, and the row table `Step`."""
