"""The launcher: starts, watches and stops the shards and the router of one deployment."""
