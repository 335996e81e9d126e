"""`funitel up` and `funitel down`: a server of many models, with processes that outlive its control plane."""
