//! Owns the choice of TCP ports: free ones on the loopback address, reserved for as long as they are needed.
//!
//! A port from the kernel's ephemeral range can't be kept over a restart: while the server is down, any outgoing
//! connection may take it. So ports come from below that range, and a second process of ours is kept off by an abstract
//! Unix socket named after the port, which vanishes with its owner however that ends.

use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use anyhow::{Result, bail};

const LOWEST: u16 = 12_000;
const HIGHEST: u16 = 32_000;

/// A port of the loopback address that no other test takes while this value lives.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reservation: UnixListener,
}

impl Port {
    /// Reserves a free port.
    ///
    /// # Errors
    /// When none is free.
    pub fn reserve() -> Result<Self> {
        let highest = ephemeral_start().clamp(LOWEST + 1, HIGHEST);
        let span = u32::from(highest - LOWEST);
        // A random start keeps parallel test processes from all trying the same ports first.
        let start = crate::random_u32() % span;
        for step in 0..span {
            let offset = u16::try_from((start + step) % span)?;
            if let Some(port) = Self::try_reserve(LOWEST + offset) {
                return Ok(port);
            }
        }
        bail!("no free port between {LOWEST} and {highest} on the loopback address");
    }

    fn try_reserve(number: u16) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("shardcron-test-port-{number}")).ok()?;
        let reservation = UnixListener::bind_addr(&name).ok()?;
        // Also asks for the port itself: a program that knows nothing of our reservations may use it.
        TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        Some(Self { number, _reservation: reservation })
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

fn ephemeral_start() -> u16 {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|range| range.split_whitespace().next()?.parse().ok())
        .unwrap_or(HIGHEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_given_to_nobody_else() -> Result<()> {
        let port = Port::reserve()?;
        assert!(Port::try_reserve(port.number()).is_none());
        let number = port.number();
        drop(port);
        assert!(Port::try_reserve(number).is_some());
        Ok(())
    }
}
