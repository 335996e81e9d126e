"""Routes of hosting platforms: KServe, SageMaker, Vertex AI."""
