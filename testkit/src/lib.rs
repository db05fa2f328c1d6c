//! Private RabbitMQ, Redis, MariaDB or MySQL for tests: start, kill, freeze, wipe, cut.
//!
//! Owns the life of servers that tests use, and the faults that tests put on them. It knows nothing of Shardcron itself,
//! and no production crate depends on it.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `SHARDCRON_TEST_RABBITMQ_SERVER`, `…_REDIS_SERVER`, `…_SQL_SERVER` | the server program, if not the usual one |
//! | `SHARDCRON_TEST_CHROOT` | run all three from this root folder instead of this machine |
//! | `SHARDCRON_TEST_RABBITMQ_CHROOT`, `…_REDIS_CHROOT`, `…_SQL_CHROOT` | the same for one; empty: this machine |
//! | `SHARDCRON_TEST_AMQP_URL`, `…_MANAGEMENT_URL`, `…_REDIS_URL`, `…_SQL_URL` | what [`shared()`] uses as it is |

mod management;
mod ports;
mod process;
mod rabbitmq;
mod redis;
mod relay;
mod root;
pub mod shared;
mod sql;
mod wait;

use std::io::Read;
use std::sync::atomic::{AtomicU32, Ordering};

pub use management::{Management, Message};
pub use ports::Port;
pub use rabbitmq::RabbitMq;
pub use redis::Redis;
pub use relay::Relay;
pub use shared::{Shared, shared, vhost_of};
pub use sql::{Flavour, Sql, execute_at};
pub use wait::{poll, wait_for, wait_until_some};

/// A name that no other test has, of letters, digits and `_`: for databases, vhosts, key and queue prefixes.
pub fn unique_prefix() -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    format!("t{:08x}_{}", random_u32(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// 32 hexadecimal digits.
fn random_token() -> String {
    (0..4).map(|_| format!("{:08x}", random_u32())).collect()
}

fn random_u32() -> u32 {
    let mut bytes = [0; 4];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    assert!(read.is_ok(), "the kernel's random numbers can't be read: {read:?}");
    u32::from_ne_bytes(bytes)
}
