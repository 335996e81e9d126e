"""What a server says about itself: the model, its limits, and a metric."""

import httpx

info = httpx.get("http://localhost:3000/info").json()
print(info["model_id"], info["router"], info["max_concurrent_requests"])
for line in httpx.get("http://localhost:3000/metrics").text.splitlines():
    if line.startswith("tgi_request_success"):
        print(line.split()[0])

# prints:
# smollm2-135m-instruct text-generation-router 128
# tgi_request_success
