//! Leadership and the server itself.

use crate::rows::Leadership;
use crate::sql::SqlLedger;
use crate::sql::dialect::Dialect;
use crate::sql::fault::{Fault, Outcome};
use crate::sql::pool::Tx;
use crate::{StoreError, sql::bulk::kept};
use shardcron_domain::Epoch;

/// Refuses a deposed leader. The row stays locked (shared) to the end of the transaction, so that no new epoch can begin between
/// this check and the commit (invariant L1).
pub(crate) async fn check_fence(tx: &mut Tx, epoch: Epoch) -> Outcome<()> {
    let sql = format!("SELECT epoch FROM leader WHERE id = 1{}", tx.dialect().for_share());
    let rows = tx.raw_rows(&sql).await?;
    let current = match rows.first() {
        Some(row) => Epoch(row.int(0)?),
        None => return Err(Fault::corrupt("the leader's row is gone".into())),
    };
    if current == epoch { Ok(()) } else { Err(Fault::Final(StoreError::Deposed { mine: epoch, current })) }
}

impl SqlLedger {
    pub(super) async fn next_epoch(&self, holder: &str, now_ms: i64) -> Outcome<Epoch> {
        let mut tx = self.db.begin().await?;
        let update = "UPDATE leader SET epoch = epoch + 1, holder = ?, since_ms = ? WHERE id = 1";
        tx.run(update, &[kept(holder, 255).into(), now_ms.into()]).await?;
        let rows = tx.raw_rows("SELECT epoch FROM leader WHERE id = 1").await?;
        let epoch = match rows.first() {
            Some(row) => row.int(0)?,
            None => return Err(Fault::corrupt("the leader's row is gone".into())),
        };
        let begin = "INSERT INTO epochs (epoch, holder, from_ms, seen_ms) VALUES (?, ?, ?, ?)";
        tx.run(begin, &[epoch.into(), kept(holder, 255).into(), now_ms.into(), now_ms.into()]).await?;
        tx.commit().await?;
        Ok(Epoch(epoch))
    }

    pub(super) async fn read_leadership(&self) -> Outcome<Leadership> {
        let rows = self.db.raw_rows("SELECT epoch, holder, since_ms FROM leader WHERE id = 1").await?;
        match rows.first() {
            Some(row) => Ok(Leadership { epoch: Epoch(row.int(0)?), holder: row.text(1)?, since_ms: row.int(2)? }),
            None => Err(Fault::corrupt("the leader's row is gone".into())),
        }
    }

    pub(super) async fn read_now(&self) -> Outcome<i64> {
        let rows = self.db.raw_rows(&format!("SELECT {}", self.now_ms())).await?;
        rows.first().map_or_else(|| Err(Fault::corrupt("the server has no clock".into())), |row| row.int(0))
    }

    pub(super) async fn read_version(&self) -> Outcome<String> {
        let sql = match self.db.dialect() {
            Dialect::MySql => "SELECT VERSION()",
            Dialect::Sqlite => "SELECT sqlite_version()",
        };
        let rows = self.db.raw_rows(sql).await?;
        let version = rows.first().map_or_else(|| Ok(String::new()), |row| row.text(0))?;
        Ok(match self.db.dialect() {
            Dialect::Sqlite => format!("SQLite {version}"),
            Dialect::MySql if version.to_ascii_lowercase().contains("mariadb") => format!("MariaDB {version}"),
            Dialect::MySql => format!("MySQL {version}"),
        })
    }

    pub(super) async fn read_faults(&self) -> Outcome<Vec<String>> {
        match self.db.dialect() {
            Dialect::MySql => self.mysql_faults().await,
            Dialect::Sqlite => {
                let rows = self.db.raw_rows("PRAGMA journal_mode").await?;
                let mode = rows.first().map_or_else(|| Ok(String::new()), |row| row.text(0))?;
                Ok(if mode.eq_ignore_ascii_case("wal") {
                    Vec::new()
                } else {
                    vec![format!(
                        "SQLite's journal is '{mode}' and not WAL, so that readers and the writer block each other; \
                         put the file on a local disk, not on a network share"
                    )]
                })
            }
        }
    }

    async fn mysql_faults(&self) -> Outcome<Vec<String>> {
        let sql = "SELECT @@max_allowed_packet, @@innodb_flush_log_at_trx_commit, @@read_only, @@version";
        let rows = self.db.raw_rows(sql).await?;
        let Some(row) = rows.first() else { return Ok(Vec::new()) };
        let mut faults = Vec::new();
        let packet = row.int(0)?;
        if packet < 1024 * 1024 {
            faults.push(format!(
                "max_allowed_packet is {packet} bytes; batches and results need 1M at least. Set max_allowed_packet=16M"
            ));
        }
        if row.int(1)? != 1 {
            faults.push(
                "innodb_flush_log_at_trx_commit is not 1: a crash of the server can lose results that were acked. \
                 Set it to 1"
                    .into(),
            );
        }
        if row.int(2)? != 0 {
            faults.push("the server is read-only: nothing can be fired or recorded. Connect to the primary".into());
        }
        let version = row.text(3)?;
        faults.extend(version_fault(&version));
        Ok(faults)
    }
}

/// What is wrong with a server's version, if it is too old.
pub(in crate::sql) fn version_fault(version: &str) -> Option<String> {
    too_old(version)
        .then(|| format!("version {version} is too old; MySQL 8.0 or MariaDB 10.6 is the least. Upgrade the server"))
}

fn too_old(version: &str) -> bool {
    // MariaDB's own prefix for replicas of an old MySQL.
    let version = version.strip_prefix("5.5.5-").filter(|rest| rest.contains("MariaDB")).unwrap_or(version);
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse::<u32>().ok());
    let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let least = if version.to_ascii_lowercase().contains("mariadb") { (10, 6) } else { (8, 0) };
    (major, minor) < least
}

#[cfg(test)]
mod tests {
    use super::too_old;

    #[test]
    fn b_04_versions_that_are_too_old() {
        for (version, old) in [
            ("10.11.6-MariaDB-0+deb12u1", false),
            ("10.5.2-MariaDB", true),
            ("5.5.5-10.6.12-MariaDB-log", false),
            ("5.5.5-10.3.1-MariaDB", true),
            ("5.7.44", true),
            ("8.0.36", false),
            ("9.7.0", false),
        ] {
            assert_eq!(too_old(version), old, "{version}");
        }
    }
}
