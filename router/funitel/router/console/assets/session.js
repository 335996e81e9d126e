// The session of this browser: whether the server has users, whose it is, and the token that changes are sent with.
import { call, setCsrfToken } from "./api.js";

export const SIGNED_OUT = { isOn: true, user: null, hasOidc: false };
const NONE = { isOn: false, user: null, hasOidc: false };

export async function lookUp() {
  const found = await call("v1/auth/session");
  return found.has_users ? take(found) : NONE;
}

function take(found) {
  setCsrfToken(found.csrf_token);
  return { isOn: true, user: found.user, hasOidc: Boolean(found.has_oidc) };
}

export const logIn = async (name, password) => take(await call("v1/auth/login", { method: "POST", body: { name, password } }));

export async function logOut() {
  await call("v1/auth/logout", { method: "POST" });
  setCsrfToken(null);
}
