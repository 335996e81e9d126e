// The npm package `oidc-provider` with one client, and people whose claims are in its answer about the user, not in the
// ID token, as the standard has it. Its argument is JSON: port, client, secret, redirect, people.
import { Provider } from "oidc-provider";

const given = JSON.parse(process.argv[2]);

const provider = new Provider(`http://127.0.0.1:${given.port}`, {
  clients: [{ client_id: given.client, client_secret: given.secret, redirect_uris: [given.redirect] }],
  pkce: { required: () => true },
  claims: { openid: ["sub"], profile: ["preferred_username", "realm_access"], email: ["email"] },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, ...given.people[id] }) }),
  cookies: { keys: ["of this test"] },
});

provider.listen(given.port, "127.0.0.1", () => console.log("listening"));
