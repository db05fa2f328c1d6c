//! `shardcron migrate`

use super::connect;
use crate::config::Config;
use crate::output::{Out, line};
use anyhow::Result;
use serde_json::json;
use shardcron_domain::address::masked;
use std::process::ExitCode;

/// Brings the tables to this version.
pub async fn run(config: Config, out: Out) -> Result<ExitCode> {
    let wired = connect(&config).await?;
    crate::wiring::migrate(&*wired.ports.ledger).await?;
    let server = wired.ports.ledger.server_version().await?;
    out.answer(&json!({ "ledger": masked(&config.ledger.url), "server": server, "migrated": true }), || {
        line(&format!("the tables at {} ({server}) are up to date", masked(&config.ledger.url)));
    });
    Ok(ExitCode::SUCCESS)
}
