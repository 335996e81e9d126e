"""The keeper: a process that holds connections and the journal of requests, so that another router can take over."""
