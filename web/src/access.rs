//! Who may ask.
//!
//! On the loopback address nobody needs a token, but the `Host` has to be a loopback name: a page in somebody's browser that
//! points its own name at 127.0.0.1 gets nothing. Anywhere else a token of some length is needed, before the server even starts
//! (case Z-01). There is no default token, and no account.

use axum::http::{HeaderMap, header};
use std::net::{IpAddr, SocketAddr};

/// Shorter ones can be tried out, and the well-known defaults are shorter.
const TOKEN_CHARS: usize = 16;

/// The rule of one server.
#[derive(Clone)]
pub(crate) struct Access {
    token: Option<String>,
}

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// See everything.
    Allowed,
    /// The token is missing or wrong.
    NoToken,
    /// It came under a name that is not this machine's own.
    WrongHost,
}

impl Access {
    /// Checks the configuration.
    pub(crate) fn new(listen: SocketAddr, token: Option<String>) -> Result<Self, String> {
        let remedy = "set a token (for instance the output of `openssl rand -hex 32`), or listen on 127.0.0.1";
        match &token {
            None if listen.ip().is_loopback() => {}
            None => {
                return Err(format!(
                    "listening on {listen} without a token would show everything to everybody; {remedy}"
                ));
            }
            Some(token) if token.trim().is_empty() => {
                return Err(format!("the web token is empty, which would be no token at all; {remedy}"));
            }
            Some(token) if token.chars().any(|c| c.is_whitespace() || c.is_control()) => {
                return Err("the web token contains a blank or a control character, which no header can carry".into());
            }
            Some(token) if token.chars().count() < TOKEN_CHARS && !listen.ip().is_loopback() => {
                return Err(format!(
                    "the web token has fewer than {TOKEN_CHARS} characters, and {listen} can be reached from other machines; \
                     {remedy}"
                ));
            }
            Some(_) => {}
        }
        Ok(Access { token })
    }

    /// Judges a request by its headers.
    pub(crate) fn judge(&self, headers: &HeaderMap) -> Verdict {
        match &self.token {
            Some(token) => {
                let presented = headers.get(header::AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
                if bearer(presented).is_some_and(|shown| same(shown, token.as_bytes())) {
                    Verdict::Allowed
                } else {
                    Verdict::NoToken
                }
            }
            None if headers.get(header::HOST).is_none_or(|host| is_loopback_name(host.to_str().unwrap_or("?"))) => {
                Verdict::Allowed
            }
            None => Verdict::WrongHost,
        }
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
}

/// Compares in a time that depends on what was presented, never on what is right.
fn same(presented: &[u8], right: &[u8]) -> bool {
    if right.is_empty() {
        return false;
    }
    let mut different = usize::from(presented.len() != right.len());
    for (at, byte) in presented.iter().enumerate() {
        different |= usize::from(byte ^ right[at % right.len()]);
        different = std::hint::black_box(different);
    }
    different == 0
}

fn is_loopback_name(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((v6, _)) => v6,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn z_01_no_open_address_without_a_real_token() {
        let token = |t: &str| Some(t.to_owned());
        assert!(Access::new(address("127.0.0.1:0"), None).is_ok());
        assert!(Access::new(address("[::1]:0"), None).is_ok());
        for listen in ["0.0.0.0:8081", "[::]:8081", "192.0.2.7:8081"] {
            for weak in [None, token(""), token(" "), token("default"), token("admin")] {
                let refused = Access::new(address(listen), weak).err().expect("refused");
                assert!(refused.contains("openssl rand"), "{refused}");
            }
            assert!(Access::new(address(listen), token("0123456789abcdef")).is_ok());
        }
        assert!(Access::new(address("127.0.0.1:0"), token("")).is_err());
    }

    #[test]
    fn only_the_whole_token_is_the_token() {
        let right = b"0123456789abcdef";
        assert!(same(right, right));
        for wrong in [
            &b""[..],
            b"0",
            b"0123456789abcde",
            b"0123456789abcdeF",
            b"0123456789abcdef0",
            b"0123456789abcdef0123456789abcdef",
        ] {
            assert!(!same(wrong, right));
        }
        assert_eq!(bearer(b"bEaReR  x "), Some(&b"x"[..]));
        assert_eq!(bearer(b"Basic eDp5"), None);
    }

    #[test]
    fn loopback_names() {
        for good in ["localhost", "localhost:8081", "127.0.0.1:8081", "[::1]:8081", "[::1]", "127.1.2.3"] {
            assert!(is_loopback_name(good), "{good}");
        }
        for bad in ["example.test", "localhost.example.test:8081", "192.0.2.1", "?", "", "127.0.0.1.example.test"] {
            assert!(!is_loopback_name(bad), "{bad}");
        }
    }
}
