//! Owns a private Redis that keeps nothing on disk, on the loopback address only.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::ports::Port;
use crate::process::{Launch, Process, process_methods};
use crate::root::Root;

const READY_BOUND: Duration = Duration::from_secs(20);
// It saves with an fsync, which on a busy disk takes seconds.
const STOP_BOUND: Duration = Duration::from_secs(60);
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// A private Redis.
#[derive(Debug)]
pub struct Redis {
    process: Process,
    setup: Setup,
}

#[derive(Debug)]
struct Setup {
    root: Root,
    server: String,
    folder: TempDir,
    port: Port,
    extra: Vec<String>,
}

impl Redis {
    /// Starts a server and waits until it answers.
    ///
    /// # Errors
    /// When the program is missing or the server does not come up.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// Starts a server with more arguments, such as `["--maxmemory", "2mb"]`; they win over the usual ones.
    ///
    /// # Errors
    /// When the program is missing or the server does not come up.
    pub fn start_with(extra: &[&str]) -> Result<Self> {
        let root = Root::of("REDIS");
        let server = root.find_server("REDIS", &["redis-server", "valkey-server"])?;
        let setup = Setup {
            folder: root.private_folder()?,
            root,
            server,
            port: Port::reserve()?,
            extra: extra.iter().map(|argument| (*argument).to_owned()).collect(),
        };
        let process = setup.start_server()?;
        Ok(Self { process, setup })
    }

    process_methods!();

    /// The port.
    pub fn port(&self) -> u16 {
        self.setup.port.number()
    }

    /// `redis://127.0.0.1:port`.
    pub fn url(&self) -> String {
        self.url_through(self.port())
    }

    /// The URL by another port: that of a [`crate::Relay`].
    pub fn url_through(&self, port: u16) -> String {
        format!("redis://127.0.0.1:{port}")
    }

    /// Stops and starts again on the same port. A server that runs is asked to save first, so its data is kept; after
    /// a [`Self::kill`] there is nothing to keep, as with any Redis that does not persist.
    ///
    /// # Errors
    /// When the server does not come up again.
    pub fn restart(&mut self) -> Result<()> {
        if self.is_running() {
            self.thaw()?;
            // No answer comes to a shutdown that works.
            let _ = call(self.port(), &["SHUTDOWN", "SAVE"]);
            if !self.process.wait_end(STOP_BOUND)? {
                bail!("Redis did not save and end within {STOP_BOUND:?}");
            }
        }
        self.start_again()
    }

    /// Kills the server and starts it on the same port with nothing in it.
    ///
    /// # Errors
    /// When the server does not come up again.
    pub fn restart_wiped(&mut self) -> Result<()> {
        self.start_again()
    }

    fn start_again(&mut self) -> Result<()> {
        self.kill()?;
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

    /// Deletes every key of every database.
    ///
    /// # Errors
    /// When the server does not answer `OK`.
    pub fn flush_all(&self) -> Result<()> {
        match self.command(&["FLUSHALL"])?.as_str() {
            "+OK" => Ok(()),
            other => bail!("FLUSHALL was answered with {other}"),
        }
    }

    /// Sends one command. Gives the first line of the answer with its type mark (`+OK`, `:1`, `-ERR …`), or the content
    /// of a bulk string, or `$-1` for none. Enough for a test's look from outside; it is no client.
    ///
    /// # Errors
    /// When the server can't be reached or does not answer in time.
    pub fn command(&self, words: &[&str]) -> Result<String> {
        call(self.port(), words)
    }
}

impl Setup {
    fn start_server(&self) -> Result<Process> {
        let port = self.port.number();
        let folder = self.root.inside(self.folder.path());
        let port_text = port.to_string();
        let usual = ["--port", &port_text, "--bind", "127.0.0.1", "--dir", &folder, "--save", "", "--appendonly", "no"];
        let mut args: Vec<String> = usual.map(str::to_owned).to_vec();
        args.extend(["--maxmemory-policy", "noeviction", "--daemonize", "no"].map(str::to_owned));
        args.extend(self.extra.iter().cloned());
        let mut process = Process::start(Launch {
            what: "redis",
            root: &self.root,
            program: &self.server,
            args,
            env: Vec::new(),
            log: self.folder.path().join("output.log"),
        })?;
        process.wait_ready(READY_BOUND, || call(port, &["PING"]).is_ok_and(|answer| answer == "+PONG"))?;
        // It is loaded. If it stayed, a later kill would bring back the data of this moment.
        let _ = std::fs::remove_file(self.folder.path().join("dump.rdb"));
        Ok(process)
    }
}

fn call(port: u16, words: &[&str]) -> Result<String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, CALL_TIMEOUT)?;
    stream.set_read_timeout(Some(CALL_TIMEOUT))?;
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    stream.write_all(request.as_bytes())?;
    let mut answer = BufReader::new(stream);
    let first = read_line(&mut answer)?;
    match first.strip_prefix('$') {
        Some(length) if length != "-1" => {
            let mut content = vec![0; length.parse()?];
            answer.read_exact(&mut content).context("reading the answer of Redis")?;
            Ok(String::from_utf8_lossy(&content).into_owned())
        }
        _ => Ok(first),
    }
}

fn read_line(answer: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    answer.read_line(&mut line).context("waiting for Redis to answer")?;
    if line.is_empty() {
        bail!("Redis closed the connection");
    }
    Ok(line.trim_end().to_owned())
}
