//! Boundary values of timeouts.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use shardcron_domain::job::Timeout;
use shardcron_domain::jobfile::parse;
use shardcron_domain::units::Span;

fn timeout(value: &str) -> Result<Timeout, String> {
    let text = format!("[job.j]\nhandler = {{ rust = \"noop\" }}\n{value}\n");
    parse(&text).map(|jobs| jobs[0].timeout).map_err(|e| e.to_string())
}

#[test]
fn x_07_boundary_values_of_the_timeout() {
    for (value, says) in [
        ("timeout = \"0s\"", "write \"none\" for no limit"),
        ("timeout = \"0\"", "the unit is missing"),
        ("timeout = 0", "duration in quotes"),
        ("timeout = \"-1s\"", "a number is missing"),
        ("timeout = -1", "duration in quotes"),
        ("timeout = 10", "duration in quotes"),
        ("timeout = \"10\"", "the unit is missing"),
        ("timeout = \"1000000000000000000s\"", "too long"),
        ("timeout = \"99999999999999999999999s\"", "too large"),
        ("timeout = 1e18", "duration in quotes"),
        ("timeout = \"\"", "it is empty"),
        ("timeout = true", "duration in quotes"),
        ("timeout = \"nil\"", "a number is missing"),
    ] {
        let refused = timeout(value).expect_err(value);
        assert!(refused.contains(says) && refused.contains("line 3"), "{value}: {refused}");
    }
    assert_eq!(timeout(""), Ok(Timeout::After(Span::mins(30))), "the default");
    assert_eq!(timeout("timeout = \"none\""), Ok(Timeout::Never));
    assert_eq!(timeout("timeout = \"1ms\""), Ok(Timeout::After(Span(1))));
}

#[test]
fn x_07_boundary_values_of_the_stall_timeout() {
    for (value, says) in [
        ("stall_timeout = \"0s\"", "too short to tell slow from stuck"),
        ("stall_timeout = \"999ms\"", "too short to tell slow from stuck"),
        ("stall_timeout = \"30m\"", "never reached"),
        ("stall_timeout = \"5s\"\ntimeout = \"5s\"", "never reached"),
    ] {
        let refused = timeout(value).expect_err(value);
        assert!(refused.contains("stall_timeout") && refused.contains(says), "{value}: {refused}");
    }
    timeout("stall_timeout = \"1s\"").unwrap();
    timeout("stall_timeout = \"400d\"\ntimeout = \"none\"").unwrap();
}
