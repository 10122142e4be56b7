"""What keeps a run alive and its numbers right: digests, copies that must agree, steps that must not count."""
