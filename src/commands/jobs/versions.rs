//! `shardcron jobs versions`, `show --version` and `delete`.

use super::{diff, unknown};
use crate::commands::{Misuse, connect_to_look, now_ms, who};
use crate::config::Config;
use crate::output::{Out, instant, line, table};
use anyhow::Result;
use serde_json::json;
use shardcron_domain::units::rfc3339;
use shardcron_store::JobChanges;
use std::process::ExitCode;

/// Versions that are listed.
const LISTED: usize = 100;

/// Lists the latest versions with what each changed.
pub async fn list(name: &str, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let rows = wired.ports.ledger.job_versions(name, LISTED + 1).await?;
    if rows.is_empty() {
        return Err(unknown(&wired, name).await?);
    }
    let changes: Vec<Vec<diff::Change>> = rows
        .iter()
        .zip(rows.iter().skip(1).map(Some).chain([None]))
        .map(|(row, before)| match (&row.spec, before) {
            (Ok(new), Some(before)) => diff::changes(before.spec.as_ref().ok(), new),
            _ => Vec::new(),
        })
        .collect();
    let listed = rows.iter().zip(&changes).take(LISTED);
    let values: Vec<_> = listed
        .clone()
        .map(|(row, changes)| {
            json!({ "version": row.version, "made": rfc3339(row.created_ms), "who": row.who, "changes": changes })
        })
        .collect();
    out.answer(&json!({ "job": name, "versions": values }), || {
        table(
            &["version", "made", "by", "what"],
            listed.map(|(row, changes)| {
                let what = match (row.version, &row.spec) {
                    (_, Err(fault)) => format!("can't be read: {fault}"),
                    (1, _) => "created".into(),
                    _ => changes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
                };
                let by = row.who.clone().unwrap_or_else(|| "-".into());
                vec![row.version.to_string(), instant(Some(row.created_ms)), by, what]
            }),
        );
    });
    Ok(ExitCode::SUCCESS)
}

/// Shows one version.
pub async fn show(name: &str, version: u32, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let Some(row) = wired.ports.ledger.job_version(name, version).await? else {
        let rows = wired.ports.ledger.job_versions(name, 1).await?;
        let Some(latest) = rows.first() else { return Err(unknown(&wired, name).await?) };
        return Err(Misuse(format!("job '{name}' has no version {version}; the latest is {}", latest.version)).into());
    };
    let spec = row.spec.map_err(|e| anyhow::anyhow!("version {version} of job '{name}' can't be read: {e}"))?;
    out.answer(&json!({ "job": spec, "version": version, "made": rfc3339(row.created_ms), "who": row.who }), || {
        line(&format!("job      {name} (version {version})"));
        line(&format!("made     {} by {}", rfc3339(row.created_ms), row.who.as_deref().unwrap_or("-")));
        line(&format!("spec     {}", spec.canonical_json()));
    });
    Ok(ExitCode::SUCCESS)
}

/// Deletes a job.
pub async fn delete(name: &str, expect: Option<u32>, config: &Config, out: Out) -> Result<ExitCode> {
    let wired = connect_to_look(config).await?;
    let Some(job) = wired.ports.ledger.job(name).await? else { return Err(unknown(&wired, name).await?) };
    let changes =
        JobChanges { delete: vec![(name.to_owned(), expect.unwrap_or(job.version))], ..JobChanges::default() };
    wired.ports.ledger.change_jobs(&changes, &who(), now_ms()).await.map_err(super::refused)?;
    out.answer(&json!({ "job": name, "state": "deleted" }), || {
        line(&format!("{name} is deleted; its executions stay in the ledger, and those that run go on"));
    });
    Ok(ExitCode::SUCCESS)
}
