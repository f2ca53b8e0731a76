"""`gapless bench serve`: a load on any server with OpenAI's API, and what its clients felt. Definitions as in
`vllm bench serve`, so that figures compare."""
