"""Headers by which the router names its client to the control plane; other users cannot reach that socket."""

ACTOR = "x-funitel-actor"  # the name of the API key
CLIENT = "x-funitel-client"  # the address of the client
ANONYMOUS = "anonymous"  # the actor where no key is asked for
