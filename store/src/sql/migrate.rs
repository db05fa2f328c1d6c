//! The tables' versions. One process migrates, the others wait (case B-04).

use super::dialect::Dialect;
use super::fault::{Fault, Kind, Outcome};
use super::pool::Db;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::mysql::MySqlDatabaseError;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _, SqlSafeStr as _};

const MYSQL: &[(i64, &str, &str)] = &[
    (1, "ledger", include_str!("../../migrations/mysql/0001_ledger.sql")),
    (2, "firing", include_str!("../../migrations/mysql/0002_firing.sql")),
    (3, "stall", include_str!("../../migrations/mysql/0003_stall.sql")),
    (5, "polling", include_str!("../../migrations/mysql/0005_polling.sql")),
    (6, "jobs", include_str!("../../migrations/mysql/0006_jobs.sql")),
    (8, "once", include_str!("../../migrations/mysql/0008_once.sql")),
    (9, "output", include_str!("../../migrations/mysql/0009_output.sql")),
    (10, "sharding", include_str!("../../migrations/mysql/0010_sharding.sql")),
    (11, "operations", include_str!("../../migrations/mysql/0011_operations.sql")),
    (12, "job_revisions", include_str!("../../migrations/mysql/0012_job_revisions.sql")),
    (13, "pruning", include_str!("../../migrations/mysql/0013_pruning.sql")),
];
const SQLITE: &[(i64, &str, &str)] = &[
    (1, "ledger", include_str!("../../migrations/sqlite/0001_ledger.sql")),
    (2, "firing", include_str!("../../migrations/sqlite/0002_firing.sql")),
    (3, "stall", include_str!("../../migrations/sqlite/0003_stall.sql")),
    (5, "polling", include_str!("../../migrations/sqlite/0005_polling.sql")),
    (6, "jobs", include_str!("../../migrations/sqlite/0006_jobs.sql")),
    (8, "once", include_str!("../../migrations/sqlite/0008_once.sql")),
    (9, "output", include_str!("../../migrations/sqlite/0009_output.sql")),
    (10, "sharding", include_str!("../../migrations/sqlite/0010_sharding.sql")),
    (11, "operations", include_str!("../../migrations/sqlite/0011_operations.sql")),
    (12, "job_revisions", include_str!("../../migrations/sqlite/0012_job_revisions.sql")),
    (13, "pruning", include_str!("../../migrations/sqlite/0013_pruning.sql")),
];
const TABLE: &str = "shardcron_migrations";
/// The server is started with `--read-only`; it is in read-only mode.
const READ_ONLY: [u16; 2] = [1290, 1836];
/// How long a node waits for another that migrates.
const WAIT_S: u32 = 60;

fn migrator(steps: &[(i64, &'static str, &'static str)]) -> Migrator {
    let migrations = steps
        .iter()
        .map(|(version, name, sql)| {
            Migration::new(*version, (*name).into(), MigrationType::Simple, (*sql).into_sql_str(), false)
        })
        .collect();
    let mut migrator = Migrator::with_migrations(migrations);
    // Our own locks: sqlx has none for SQLite, and does not look at the answer of MySQL's.
    migrator.set_locking(false);
    // During a rolling downgrade the older program meets the newer one's steps.
    migrator.set_ignore_missing(true);
    migrator.dangerous_set_table_name(TABLE);
    migrator
}

pub(crate) async fn migrate(db: &Db) -> Outcome<()> {
    let dialect = db.dialect();
    let classify = |e: &sqlx::Error| dialect.classify(e);
    match db {
        Db::Sqlite { writer, .. } => {
            // Everything in one transaction that holds the write lock: the others wait, then find nothing to do.
            let mut tx = writer.begin_with(dialect.begin()).await.map_err(|e| classify(&e))?;
            migrator(SQLITE).run_direct(None, &mut *tx, false).await.map_err(|e| migration_fault(dialect, &e))?;
            tx.commit().await.map_err(|e| classify(&e))
        }
        Db::MySql { pool, .. } => {
            let mut connection = pool.acquire().await.map_err(|e| classify(&e))?;
            refuse_old(&mut connection).await?;
            locked(
                &mut connection,
                &format!("SELECT CAST(GET_LOCK(CONCAT('shardcron:', DATABASE()), {WAIT_S}) AS SIGNED)"),
            )
            .await?;
            let done = run_mysql(&mut connection).await;
            // A connection that keeps the lock would make the next one wait.
            let unlocked = sqlx::raw_sql("SELECT RELEASE_LOCK(CONCAT('shardcron:', DATABASE()))")
                .fetch_optional(&mut *connection)
                .await;
            if unlocked.is_err() {
                connection.close_on_drop();
            }
            done
        }
    }
}

/// Before anything is made: an old server would refuse some later statement in words of its own, or take it and mean something else.
async fn refuse_old(connection: &mut MySqlConnection) -> Outcome<()> {
    let asked = sqlx::raw_sql("SELECT VERSION()").fetch_one(connection).await;
    let version = asked.and_then(|row| row.try_get_unchecked::<String, _>(0));
    let version = version.map_err(|e| Dialect::MySql.classify(&e))?;
    match super::ledger::version_fault(&version) {
        None => Ok(()),
        Some(fault) => Err(Fault::invalid(format!("nothing was made: the server's {fault}"))),
    }
}

async fn locked(connection: &mut MySqlConnection, text: &str) -> Outcome<()> {
    let dialect = Dialect::MySql;
    let row =
        sqlx::raw_sql(AssertSqlSafe(text.to_owned())).fetch_one(connection).await.map_err(|e| dialect.classify(&e))?;
    match row.try_get_unchecked::<Option<i64>, _>(0) {
        Ok(Some(1)) => Ok(()),
        _ => Err(Fault::Server {
            kind: Kind::Refused,
            detail: format!("another node has been migrating the tables for {WAIT_S} s; try again when it is done"),
        }),
    }
}

async fn run_mysql(connection: &mut MySqlConnection) -> Outcome<()> {
    // A node died between two statements of a step. Each statement can be run again, so the step simply is.
    let clean = format!("DELETE FROM {TABLE} WHERE success = 0");
    let _ = sqlx::raw_sql(AssertSqlSafe(clean)).execute(&mut *connection).await;
    migrator(MYSQL).run_direct(None, connection, false).await.map_err(|e| migration_fault(Dialect::MySql, &e))
}

/// What the server will not do now it will not do in half a second either (a right that is missing, a step that was changed): that is for a
/// person. Worth another try are a connection that is lost, a lock that somebody has, and a server that is read-only until it is the primary.
fn migration_fault(dialect: Dialect, error: &MigrateError) -> Fault {
    let detail = format!("the tables can't be brought up to date: {error}");
    let (MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)) = error else {
        return Fault::invalid(detail);
    };
    let of_server = inner.as_database_error().and_then(|of| of.try_downcast_ref::<MySqlDatabaseError>());
    match dialect.classify(inner) {
        Fault::Server { kind: kind @ (Kind::Lost | Kind::Contention), .. } => Fault::Server { kind, detail },
        _ if of_server.is_some_and(|of| READ_ONLY.contains(&of.number())) => {
            Fault::Server { kind: Kind::Refused, detail }
        }
        _ => Fault::invalid(detail),
    }
}
