"""Headers by which the router names its client to the control plane; other users cannot reach that socket."""

ACTOR = "x-funitel-actor"  # the name of the API key, or of the user of a session
USER = "x-funitel-user"  # the user that the key or the session belongs to; none for keys of files
ROLE = "x-funitel-role"  # of that user
CLIENT = "x-funitel-client"  # the address of the client
ORIGIN = "x-funitel-origin"  # scheme and host by which the client reached the router
ANONYMOUS = "anonymous"  # the actor where no key is asked for

SESSION_NAME = "~session"  # after the user's name and a slash, instead of a key's name, which this cannot be
