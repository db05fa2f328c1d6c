//! Owns a private MariaDB or MySQL, on the loopback address only.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::management::decode;
use crate::ports::Port;
use crate::process::{Launch, Process, process_methods};
use crate::root::Root;

const READY_BOUND: Duration = Duration::from_secs(90);
const STOP_BOUND: Duration = Duration::from_secs(30);
const USER: &str = "shardcron";
const DATABASE: &str = "shardcron";

/// Which of the two a server is: they differ in how a data folder is made, and in some options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// MariaDB, as in Debian.
    MariaDb,
    /// MySQL 8 or later.
    MySql,
}

/// A private MariaDB or MySQL.
#[derive(Debug)]
pub struct Sql {
    process: Process,
    setup: Setup,
}

#[derive(Debug)]
struct Setup {
    root: Root,
    server: String,
    flavour: Flavour,
    version: String,
    folder: TempDir,
    port: Port,
    password: String,
    extra: Vec<String>,
}

impl Sql {
    /// Makes a data folder, starts a server on it and waits until it answers a query.
    ///
    /// # Errors
    /// When a program is missing or the server does not come up.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// The same with more arguments, such as `["--max-connections=20"]`; they win over the usual ones.
    ///
    /// # Errors
    /// As [`Self::start`], or when it refuses an argument.
    pub fn start_with(extra: &[&str]) -> Result<Self> {
        let root = Root::of("SQL");
        let server = root.find_server("SQL", &["mariadbd", "mysqld"])?;
        let version = run(root.command(&server).arg("--version"))?.trim().to_owned();
        let flavour = if version.contains("MariaDB") { Flavour::MariaDb } else { Flavour::MySql };
        let folder = root.private_folder()?;
        let extra = extra.iter().map(|argument| (*argument).to_owned()).collect();
        let (port, password) = (Port::reserve()?, crate::random_token());
        let setup = Setup { folder, root, server, flavour, version, port, password, extra };
        setup.make_data()?;
        let process = setup.start_server()?;
        Ok(Self { process, setup })
    }

    process_methods!();

    /// The port.
    pub fn port(&self) -> u16 {
        self.setup.port.number()
    }

    /// `mysql://user:password@127.0.0.1:port/shardcron`; the user may do everything.
    pub fn url(&self) -> String {
        self.url_of(DATABASE)
    }

    /// The URL by another port: that of a [`crate::Relay`].
    pub fn url_through(&self, port: u16) -> String {
        format!("mysql://{USER}:{}@127.0.0.1:{port}/{DATABASE}", self.setup.password)
    }

    /// The URL of another database.
    pub fn url_of(&self, database: &str) -> String {
        format!("mysql://{USER}:{}@127.0.0.1:{}/{database}", self.setup.password, self.port())
    }

    /// MariaDB or MySQL.
    pub fn flavour(&self) -> Flavour {
        self.setup.flavour
    }

    /// What the server says to `--version`.
    pub fn version(&self) -> &str {
        &self.setup.version
    }

    /// Makes a database and gives its URL: many tests can share one server.
    ///
    /// # Errors
    /// When it exists, or the server does not answer.
    pub fn create_database(&self, name: &str) -> Result<String> {
        self.execute(&format!("CREATE DATABASE `{name}` CHARACTER SET utf8mb4"))?;
        Ok(self.url_of(name))
    }

    /// Runs statements in the database `shardcron` by the server's own client; gives its tab-separated rows, without
    /// column names.
    ///
    /// # Errors
    /// When a statement fails, with the client's words.
    pub fn execute(&self, statements: &str) -> Result<String> {
        execute_in(&self.setup.root, &self.url(), statements)
    }

    /// What the server has written to its log so far.
    ///
    /// # Errors
    /// When the file can't be read.
    pub fn log(&self) -> Result<String> {
        let path = self.setup.path("output.log");
        let bytes = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Stops (if it runs: in order, with SIGTERM) and starts again on the same port with the same data.
    ///
    /// # Errors
    /// When the server does not come up again.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.process = self.setup.start_server()?;
        Ok(())
    }

    /// Ends the server in order (SIGTERM), or by SIGKILL when it takes too long.
    ///
    /// # Errors
    /// When the process can't be signalled.
    pub fn stop(&mut self) -> Result<()> {
        self.process.terminate(STOP_BOUND)
    }
}

impl Setup {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn inside(&self, name: &str) -> String {
        self.root.inside(&self.path(name))
    }

    fn make_data(&self) -> Result<()> {
        fs::create_dir(self.path("tmp"))?;
        let data = format!("--datadir={}", self.inside("data"));
        let mut command = match self.flavour {
            Flavour::MariaDb => {
                let mut command = self.root.command(&self.root.find(&["mariadb-install-db", "mysql_install_db"])?);
                command.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
                command
            }
            Flavour::MySql => {
                let mut command = self.root.command(&self.server);
                command.args(["--no-defaults", "--initialize-insecure"]);
                command
            }
        };
        run(command.arg(data).args(as_root()).envs(self.environment()))?;
        // Run by the server at each start, before it takes connections. Leaves only our user, with a password.
        let password = &self.password;
        let mut script = String::new();
        for host in ["127.0.0.1", "localhost"] {
            script.push_str(&format!("CREATE USER IF NOT EXISTS '{USER}'@'{host}' IDENTIFIED BY '{password}';\n"));
            script.push_str(&format!("GRANT ALL PRIVILEGES ON *.* TO '{USER}'@'{host}' WITH GRANT OPTION;\n"));
            script.push_str(&format!("ALTER USER IF EXISTS 'root'@'{host}' IDENTIFIED BY '{password}';\n"));
        }
        for user in ["'root'@'::1'", "''@'localhost'"] {
            script.push_str(&format!("DROP USER IF EXISTS {user};\n"));
        }
        script.push_str(&format!("CREATE DATABASE IF NOT EXISTS `{DATABASE}` CHARACTER SET utf8mb4;\n"));
        fs::write(self.path("init.sql"), script)?;
        Ok(())
    }

    /// A server that starts deletes what looks like a temporary table in its temporary folder: in a common one, those of
    /// other servers.
    fn environment(&self) -> Vec<(String, String)> {
        vec![("TMPDIR".to_owned(), self.inside("tmp"))]
    }

    fn start_server(&self) -> Result<Process> {
        let mut args = vec![
            "--no-defaults".to_owned(),
            format!("--datadir={}", self.inside("data")),
            format!("--init-file={}", self.inside("init.sql")),
            format!("--pid-file={}", self.inside("server.pid")),
            format!("--port={}", self.port.number()),
            "--bind-address=127.0.0.1".to_owned(),
            // Relative to the data folder: an absolute path may be longer than a socket's name can be.
            "--socket=server.sock".to_owned(),
            "--skip-name-resolve".to_owned(),
            "--innodb-flush-log-at-trx-commit=1".to_owned(),
            "--innodb-buffer-pool-size=128M".to_owned(),
            "--max-connections=300".to_owned(),
            "--performance-schema=OFF".to_owned(),
        ];
        if self.flavour == Flavour::MySql {
            // MySQL keeps a binary log and an X protocol port unless told not to; MariaDB does neither.
            args.extend(["--skip-log-bin", "--mysqlx=OFF"].map(str::to_owned));
        }
        args.extend(as_root());
        args.extend(self.extra.iter().cloned());
        let mut process = Process::start(Launch {
            what: "the SQL server",
            root: &self.root,
            program: &self.server,
            args,
            env: self.environment(),
            log: self.path("output.log"),
        })?;
        let url = format!("mysql://{USER}:{}@127.0.0.1:{}/{DATABASE}", self.password, self.port.number());
        process.wait_ready(READY_BOUND, || execute_in(&self.root, &url, "SELECT 1").is_ok())?;
        Ok(process)
    }
}

/// Runs statements in the database that `url` names, by the client of the configured root.
///
/// # Errors
/// When a statement fails, with the client's words.
pub fn execute_at(url: &str, statements: &str) -> Result<String> {
    execute_in(&Root::of("SQL"), url, statements)
}

fn execute_in(root: &Root, url: &str, statements: &str) -> Result<String> {
    let Address { user, password, host, port, database } = Address::parse(url)?;
    let client = root.find(&["mariadb", "mysql"]).context("the client of MariaDB or MySQL")?;
    let mut command = root.command(&client);
    command.args(["--no-defaults", "--protocol=TCP", "--batch", "--skip-column-names"]);
    command.args(["--host", &host, "--port", &port, "--user", &user]);
    // Not as an argument: those can be read by everyone on the machine.
    command.env("MYSQL_PWD", &password);
    if !database.is_empty() {
        command.arg(format!("--database={database}"));
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut input = child.stdin.take().context("the client's input")?;
    // A client that can't connect does not read; its own words come below, and say more than a broken pipe.
    let _ = input.write_all(statements.as_bytes());
    drop(input);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

struct Address {
    user: String,
    password: String,
    host: String,
    port: String,
    database: String,
}

impl Address {
    fn parse(url: &str) -> Result<Self> {
        let rest = url.strip_prefix("mysql://").context("an SQL URL begins with mysql://")?;
        let (login, place) = rest.rsplit_once('@').context("an SQL URL names user:password@")?;
        let (user, password) = login.split_once(':').unwrap_or((login, ""));
        let (address, database) = place.split_once('/').unwrap_or((place, ""));
        let (host, port) = address.split_once(':').unwrap_or((address, "3306"));
        let database = database.split('?').next().unwrap_or_default();
        Ok(Self {
            user: decode(user),
            password: decode(password),
            host: host.to_owned(),
            port: port.to_owned(),
            database: decode(database),
        })
    }
}

/// `url` with another database in it.
pub(crate) fn with_database(url: &str, database: &str) -> Result<String> {
    let (scheme, rest) = url.split_once("://").context("an SQL URL begins with mysql://")?;
    let address = rest.split('/').next().unwrap_or_default();
    Ok(format!("{scheme}://{address}/{database}"))
}

/// Both servers refuse to run as root unless told so in words.
fn as_root() -> Option<String> {
    let owner = fs::metadata("/proc/self").map(|process| process.uid());
    matches!(owner, Ok(0)).then(|| "--user=root".to_owned())
}

fn run(command: &mut std::process::Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("running {program}"))?;
    if !output.status.success() {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        bail!("{program} failed ({}): {out}{err}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_url() -> Result<()> {
        let address = Address::parse("mysql://me:p%40ss@127.0.0.1:3307/mine?ssl-mode=disabled")?;
        assert_eq!((address.user.as_str(), address.password.as_str()), ("me", "p@ss"));
        assert_eq!((address.host.as_str(), address.port.as_str()), ("127.0.0.1", "3307"));
        assert_eq!(address.database, "mine");
        assert_eq!(with_database("mysql://a:b@c:1/old", "new")?, "mysql://a:b@c:1/new");
        Ok(())
    }
}
