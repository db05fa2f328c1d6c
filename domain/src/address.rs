//! Addresses of services, as people may see them.

/// An address without what may be a password in it, whatever somebody wrote there (case Z-05). What can't be read as an address with a user, a
/// host and a path is not shown at all: it may be a password with an `@` too few.
#[must_use]
pub fn masked(url: &str) -> String {
    const HIDDEN: &str = "…";
    if url.starts_with("sqlite:") {
        return url.to_owned();
    }
    let Some((scheme, rest)) = url.split_once("://") else { return HIDDEN.to_owned() };
    // What follows a '?' is options, of which some are keys; or it is of a password that should have been encoded.
    let (place, options) = match rest.split_once('?') {
        Some((place, _)) => (place, "?…"),
        None => (rest, ""),
    };
    let (login, place) = match place.rsplit_once('@') {
        Some((login, place)) if login.contains(':') => (format!("{}:…@", user(url).unwrap_or_default()), place),
        Some((_, place)) => ("…@".into(), place),
        None => (String::new(), place),
    };
    if is_place(place) { format!("{scheme}://{login}{place}{options}") } else { format!("{scheme}://{HIDDEN}") }
}

/// A sentence that may quote an address, without what may be a password in it. Up to the last '@' nothing of it is shown, since a password
/// may have anything in it; where there is none, it is shown as [`masked`] does.
#[must_use]
pub fn without_passwords(text: &str) -> String {
    let Some((before, rest)) = text.split_once("://") else { return text.to_owned() };
    if let Some((_, place)) = rest.rsplit_once('@') {
        return format!("{before}://…@{place}");
    }
    let ends = |c: char| c.is_whitespace() || matches!(c, '\'' | '"' | '`');
    let (word, after) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
    // The scheme does not matter to how the rest is shown.
    let shown = masked(&format!("x://{word}"));
    format!("{before}{}{}", &shown[1..], without_passwords(after))
}

/// The user that an address names. One without a ':' behind it is none: it may be a password that somebody wrote alone.
#[must_use]
pub fn user(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let (login, _) = rest.split_once('?').map_or(rest, |(place, _)| place).rsplit_once('@')?;
    login.split_once(':').map(|(user, _)| user).filter(|user| !user.is_empty())
}

/// `host`, `host:port`, `[::1]:port`, each with a path.
fn is_place(place: &str) -> bool {
    let host = place.split('/').next().unwrap_or_default();
    let host = host.rsplit_once(']').map_or(host, |(_, after)| after);
    match host.split_once(':') {
        Some((_, port)) => port.parse::<u16>().is_ok(),
        None => !place.contains('#'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn z_05_people_see_which_server_it_is() {
        for (url, shown) in [
            ("mysql://root:s3cr:et@h:3306/db", "mysql://root:…@h:3306/db"),
            ("mysql://root:a/b#c@d@h:3306/db", "mysql://root:…@h:3306/db"),
            ("redis://:pw@h", "redis://:…@h"),
            ("redis://pw@h:6379/0", "redis://…@h:6379/0"),
            ("amqp://me:x@[::1]:5672/%2f", "amqp://me:…@[::1]:5672/%2f"),
            ("mysql://h/db?ssl-mode=required", "mysql://h/db?…"),
            ("mysql://me:x@h/db?key=a@b", "mysql://me:…@h/db?…"),
            ("sqlite://x.db", "sqlite://x.db"),
            ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379"),
        ] {
            assert_eq!(masked(url), shown, "{url}");
        }
    }

    #[test]
    fn z_05_a_sentence_shows_no_password() {
        for (said, shown) in [
            ("'mysql://u:hu'sh @x@h/d' is not a duration", "'mysql://…@h/d' is not a duration"),
            ("'mysql://u:hush/d' and 'redis://hu#sh' are none", "'mysql://…' and 'redis://…' are none"),
            (
                "'http://h:80/x' is not to be had; write https://h/",
                "'http://h:80/x' is not to be had; write https://h/",
            ),
            ("write http:// or https://", "write http:// or https://"),
            ("'who@where' is no name", "'who@where' is no name"),
        ] {
            assert_eq!(without_passwords(said), shown);
        }
    }

    #[test]
    fn z_05_a_name_alone_may_be_a_password() {
        for (url, named) in [
            ("amqp://me:x@h/%2f", Some("me")),
            ("amqp://me:a:b@c@h/%2f", Some("me")),
            ("amqp://me:@h", Some("me")),
            ("amqp://hush@h/%2f", None),
            ("redis://:hush@h", None),
            ("amqp://h/x?me:hush@h", None),
            ("amqp://h", None),
        ] {
            assert_eq!(user(url), named, "{url}");
        }
    }

    #[test]
    fn z_05_what_can_not_be_read_is_not_shown() {
        for url in [
            "hush",
            "me:hush@h/db",
            "mysql:/me:hush@h/db",
            "mysql://me:hush/db",
            "mysql://me:hush",
            "mysql://me:hu?sh@h/db",
            "mysql://me:x@h:hush/db",
            "mysql://h#hush",
            "redis://hush@h",
        ] {
            let shown = masked(url);
            assert!(!shown.contains("hu") && !shown.contains("sh@"), "{url}: {shown}");
        }
    }
}
