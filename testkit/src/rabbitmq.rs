//! Owns a private RabbitMQ with its management API, on the loopback address only.
//!
//! Not by Debian's wrapper: that changes to a system user and to the system's folders. The server script behind it
//! takes every path and port from the environment, in 3.10 as in 4.x.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::management::Management;
use crate::ports::Port;
use crate::process::{Launch, Process, process_methods};
use crate::root::Root;

const READY_BOUND: Duration = Duration::from_secs(120);
const STOP_BOUND: Duration = Duration::from_secs(30);
const EPMD_BOUND: Duration = Duration::from_secs(10);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const USER: &str = "shardcron";

/// A private RabbitMQ.
#[derive(Debug)]
pub struct RabbitMq {
    // Dropped in this order: the processes end before their folder and ports are given up.
    process: Process,
    /// Erlang's name service. Ours, because a shared one would be started by whoever comes first, and stay.
    _epmd: Process,
    setup: Setup,
    management: Management,
}

#[derive(Debug)]
struct Setup {
    root: Root,
    server: String,
    folder: TempDir,
    amqp: Port,
    management: Port,
    distribution: Port,
    epmd: Port,
    password: String,
}

impl RabbitMq {
    /// Starts a server and waits until it takes AMQP connections and management calls.
    ///
    /// # Errors
    /// When the program is missing or the server does not come up.
    pub fn start() -> Result<Self> {
        Self::start_with("[].\n")
    }

    /// The same with an `advanced.config` of one's own: an Erlang term, such as `[{rabbit, [{consumer_timeout, 3000}]}].`
    ///
    /// # Errors
    /// When the program is missing or the server does not come up with it.
    pub fn start_with(advanced: &str) -> Result<Self> {
        let root = Root::of("RABBITMQ");
        let server = root.find_server("RABBITMQ", &["/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server"])?;
        let setup = Setup {
            folder: root.private_folder()?,
            root,
            server,
            amqp: Port::reserve()?,
            management: Port::reserve()?,
            distribution: Port::reserve()?,
            epmd: Port::reserve()?,
            password: crate::random_token(),
        };
        setup.write_files(advanced)?;
        let url = format!("http://{USER}:{}@127.0.0.1:{}", setup.password, setup.management.number());
        let management = Management::from_url(&url)?;
        let epmd = setup.start_epmd()?;
        let process = setup.start_server(&management)?;
        Ok(Self { process, _epmd: epmd, setup, management })
    }

    process_methods!();

    /// The AMQP port.
    pub fn port(&self) -> u16 {
        self.setup.amqp.number()
    }

    /// `amqp://user:password@127.0.0.1:port/%2f`, the default vhost.
    pub fn url(&self) -> String {
        self.amqp_url()
    }

    /// As [`Self::url`].
    pub fn amqp_url(&self) -> String {
        self.amqp_url_through(self.port())
    }

    /// The AMQP URL by another port: that of a [`crate::Relay`].
    pub fn amqp_url_through(&self, port: u16) -> String {
        format!("amqp://{USER}:{}@127.0.0.1:{port}/%2f", self.setup.password)
    }

    /// `http://127.0.0.1:port`, without the login.
    pub fn management_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.management_port())
    }

    /// The management URL with the login in it, as [`Management::from_url`] reads it.
    pub fn management_url_with_login(&self) -> String {
        format!("http://{USER}:{}@127.0.0.1:{}", self.setup.password, self.management_port())
    }

    /// The port of the management API.
    pub fn management_port(&self) -> u16 {
        self.setup.management.number()
    }

    /// The administrator's name.
    pub fn management_user(&self) -> &str {
        USER
    }

    /// The administrator's password.
    pub fn management_password(&self) -> &str {
        &self.setup.password
    }

    /// What a person does in the management UI, in the default vhost.
    pub fn management(&self) -> &Management {
        &self.management
    }

    /// Stops (if it runs: in order, with SIGTERM) and starts again on the same ports with the same data.
    ///
    /// # Errors
    /// When the server does not come up again.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.process = self.setup.start_server(&self.management)?;
        Ok(())
    }

    /// Kills the server and starts it on the same ports with nothing in it: no queue, no exchange, no vhost.
    ///
    /// # Errors
    /// When the server does not come up again.
    pub fn restart_wiped(&mut self) -> Result<()> {
        self.kill()?;
        fs::remove_dir_all(self.setup.path("data"))?;
        self.restart()
    }

    /// Brings the server into its memory alarm, or out of it: it then takes no messages and says so to who publishes
    /// (`connection.blocked`).
    ///
    /// # Errors
    /// When `rabbitmqctl` is missing or refuses.
    pub fn memory_alarm(&self, on: bool) -> Result<()> {
        let setup = &self.setup;
        let program = setup.root.find(&["/usr/lib/rabbitmq/bin/rabbitmqctl", "rabbitmqctl"])?;
        let share = if on { "0.000001" } else { "0.6" };
        let mut command = setup.root.command(&program);
        let output = command
            .args(["set_vm_memory_high_watermark", share])
            .envs(setup.environment())
            .output()
            .context("rabbitmqctl can't be run")?;
        anyhow::ensure!(
            output.status.success(),
            "rabbitmqctl ended with {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
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

    fn write_files(&self, advanced: &str) -> Result<()> {
        let conf = format!(
            "listeners.tcp.1 = 127.0.0.1:{amqp}\n\
             management.tcp.ip = 127.0.0.1\n\
             management.tcp.port = {management}\n\
             default_user = {USER}\n\
             default_pass = {password}\n\
             log.file.level = warning\n\
             # So that queue depths in the management API are fresh.\n\
             collect_statistics_interval = 1000\n\
             # The usual way reads /proc, which another root may not have.\n\
             vm_memory_calculation_strategy = allocated\n\
             disk_free_limit.absolute = 50MB\n",
            amqp = self.amqp.number(),
            management = self.management.number(),
            password = self.password,
        );
        fs::write(self.path("rabbitmq.conf"), conf)?;
        fs::write(self.path("advanced.config"), advanced)?;
        fs::write(self.path("enabled_plugins"), "[rabbitmq_management].\n")?;
        fs::write(self.path("rabbitmq-env.conf"), "")?;
        fs::create_dir(self.path("conf.d"))?;
        Ok(())
    }

    fn start_epmd(&self) -> Result<Process> {
        let program = self.root.find(&["epmd"]).context("Erlang's epmd, which comes with RabbitMQ")?;
        let port = self.epmd.number();
        let mut process = Process::start(Launch {
            what: "epmd",
            root: &self.root,
            program: &program,
            args: ["-port", &port.to_string(), "-address", "127.0.0.1"].map(str::to_owned).to_vec(),
            env: Vec::new(),
            log: self.path("epmd.log"),
        })?;
        process.wait_ready(EPMD_BOUND, || connect(port).is_some())?;
        Ok(process)
    }

    fn start_server(&self, management: &Management) -> Result<Process> {
        let mut process = Process::start(Launch {
            what: "rabbitmq",
            root: &self.root,
            program: &self.server,
            // Goes with RABBITMQ_ALLOW_INPUT below.
            args: vec!["-noinput".to_owned()],
            env: self.environment(),
            log: self.path("output.log"),
        })?;
        process.wait_ready(READY_BOUND, || speaks_amqp(self.amqp.number()) && management.is_ready())?;
        Ok(process)
    }

    fn environment(&self) -> Vec<(String, String)> {
        let port = self.amqp.number();
        let path = |name: &str| self.inside(name);
        let pairs = [
            // Makes the script become the Erlang machine instead of keeping a shell above it: one process to signal.
            ("RABBITMQ_ALLOW_INPUT", "true".to_owned()),
            // The process id is in the name so that a stray node can be told to be nobody's.
            ("RABBITMQ_NODENAME", format!("sc{}-{port}@localhost", std::process::id())),
            ("RABBITMQ_NODE_PORT", port.to_string()),
            ("RABBITMQ_DIST_PORT", self.distribution.number().to_string()),
            ("ERL_EPMD_PORT", self.epmd.number().to_string()),
            ("ERL_EPMD_ADDRESS", "127.0.0.1".to_owned()),
            ("HOME", path("")),
            ("RABBITMQ_CONF_ENV_FILE", path("rabbitmq-env.conf")),
            ("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf")),
            ("RABBITMQ_CONFIG_FILES", path("conf.d/*.conf")),
            ("RABBITMQ_ADVANCED_CONFIG_FILE", path("advanced.config")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", path("enabled_plugins")),
            ("RABBITMQ_MNESIA_BASE", path("data")),
            ("RABBITMQ_LOG_BASE", path("log")),
            ("RABBITMQ_GENERATED_CONFIG_DIR", path("generated")),
            ("RABBITMQ_SCHEMA_DIR", path("schema")),
            ("RABBITMQ_PLUGINS_EXPAND_DIR", path("plugins-expand")),
            ("RABBITMQ_PID_FILE", path("rabbitmq.pid")),
            // Few schedulers: they start quicker, and many nodes share the test machine.
            (
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                "+S 2:2 +SDcpu 2:2 +SDio 2 -kernel inet_dist_use_interface {127,0,0,1}".to_owned(),
            ),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

fn connect(port: u16) -> Option<TcpStream> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = TcpStream::connect_timeout(&address, PROBE_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(PROBE_TIMEOUT)).ok()?;
    Some(stream)
}

/// Sends the protocol header; a broker that is up answers with a method frame (type 1): `connection.start`.
fn speaks_amqp(port: u16) -> bool {
    let Some(mut stream) = connect(port) else { return false };
    let mut first = [0];
    stream.write_all(b"AMQP\x00\x00\x09\x01").is_ok() && stream.read_exact(&mut first).is_ok() && first == [1]
}
