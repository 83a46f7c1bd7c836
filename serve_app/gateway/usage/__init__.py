"""Usage as clients ask for it: our own route, OpenAI's, and Cloudflare's GraphQL, all of them queries of one store."""
