"""What router, shards and launcher share: the wire, its nouns, errors, settings and logging."""
