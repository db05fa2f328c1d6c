//! The server over real HTTP, with answers made up by the test.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::Value;
use shardcron_domain::metric_names;
use shardcron_domain::modes::Mode;
use shardcron_domain::{ExecutionId, Incarnation, JobId};
use shardcron_store::{ActiveExecution, JobRecord, Overview, SeenWorker, StoreError, TierOverview, WorkerBeat};
use shardcron_web::{
    CallbackDesk, Degraded, Dependency, Health, Leader, Pending, PendingExecution, WebError, WebHandle, WebOptions,
    WebState, build_recorder, serve,
};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TOKEN: &str = "a-token-of-the-test-0123456789";

/// What the server is told.
#[derive(Default)]
struct Told {
    health: Mutex<Health>,
    workers: Mutex<Vec<SeenWorker>>,
    jobs: Mutex<Vec<JobRecord>>,
    pending: Mutex<Pending>,
    store_away: Mutex<bool>,
    hangs: Mutex<bool>,
}

impl Told {
    async fn answer<T: Clone>(&self, what: &Mutex<T>) -> Result<T, StoreError> {
        if *self.hangs.lock().unwrap() {
            std::future::pending::<()>().await;
        }
        if *self.store_away.lock().unwrap() {
            return Err(StoreError::Unavailable { store: "ledger", detail: "connection refused".into() });
        }
        Ok(what.lock().unwrap().clone())
    }
}

#[async_trait::async_trait]
impl WebState for Told {
    async fn health(&self) -> Health {
        if *self.hangs.lock().unwrap() {
            std::future::pending::<()>().await;
        }
        self.health.lock().unwrap().clone()
    }
    async fn workers(&self) -> Result<Vec<SeenWorker>, StoreError> {
        self.answer(&self.workers).await
    }
    async fn jobs(&self) -> Result<Vec<JobRecord>, StoreError> {
        self.answer(&self.jobs).await
    }
    async fn pending(&self) -> Result<Pending, StoreError> {
        self.answer(&self.pending).await
    }
}

struct Server {
    runtime: tokio::runtime::Runtime,
    handle: WebHandle,
    told: Arc<Told>,
}

struct Answer {
    status: u16,
    headers: ureq::http::HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

impl Server {
    fn start(token: Option<&str>, metrics: Option<PrometheusHandle>) -> Self {
        Self::with(|options| {
            options.token = token.map(str::to_owned);
            options.metrics = metrics;
        })
    }

    fn with(change: impl FnOnce(&mut WebOptions)) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let told = Arc::new(Told::default());
        let mut options = WebOptions::new("127.0.0.1:0".parse().unwrap());
        options.answer_within = Duration::from_millis(200);
        change(&mut options);
        let handle = runtime.block_on(serve(options, told.clone())).unwrap();
        Server { runtime, handle, told }
    }

    fn request(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(10)))
            .build()
            .new_agent();
        let uri = format!("http://{}{path}", self.handle.local_addr());
        let mut request = ureq::http::Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut response = agent.run(request.body(()).unwrap()).unwrap();
        let body = response.body_mut().read_to_string().unwrap();
        Answer { status: response.status().as_u16(), headers: response.headers().clone(), body }
    }

    fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[])
    }

    fn stop(self) {
        self.runtime.block_on(self.handle.shutdown());
    }

    /// For what a decent client does not send.
    fn raw(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.handle.local_addr()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }
}

fn well() -> Health {
    Health {
        roles: vec!["scheduler".into(), "worker".into()],
        leading: true,
        leader: Some(Leader { holder: "one".into(), epoch: 7, since_ms: 1_000, alive: Some(true) }),
        dependencies: vec![
            Dependency::up("ledger", Some("MariaDB 10.11".into())),
            Dependency::up("broker", Some("RabbitMQ 4.0".into())),
        ],
        degraded: vec![],
        problems: vec![],
    }
}

#[test]
fn healthz_is_200_while_all_is_well_and_503_when_a_dependency_is_down() {
    let server = Server::start(None, None);
    *server.told.health.lock().unwrap() = well();
    let answer = server.get("/healthz");
    let json = answer.json();
    assert_eq!((answer.status, &json["status"]), (200, &"ok".into()));
    assert_eq!((&json["leader"]["holder"], &json["leader"]["epoch"]), (&"one".into(), &7.into()));
    assert_eq!(json["dependencies"][1]["version"], "RabbitMQ 4.0");

    let down = Dependency::down("broker", "connection refused by 127.0.0.1:5672");
    server.told.health.lock().unwrap().dependencies[1] = down.clone();
    let answer = server.get("/healthz");
    let json = answer.json();
    assert_eq!((answer.status, &json["status"]), (503, &"down".into()));
    assert_eq!(json["dependencies"][0]["ok"], true);
    assert_eq!(json["dependencies"][1]["ok"], false);
    assert_eq!(json["dependencies"][1]["detail"], "connection refused by 127.0.0.1:5672");

    server.told.health.lock().unwrap().dependencies[1] = down.optional();
    let answer = server.get("/healthz");
    assert_eq!((answer.status, &answer.json()["status"]), (200, &"degraded".into()));
    assert_eq!(server.get("/livez").status, 200);

    let mode = Degraded::new(Mode::RedisAway, 0, "connection refused by 127.0.0.1:6379".into());
    *server.told.health.lock().unwrap() = Health { degraded: vec![mode], ..well() };
    let answer = server.get("/healthz");
    let json = answer.json();
    assert_eq!((answer.status, &json["status"]), (200, &"degraded".into()));
    let mode = &json["degraded"][0];
    assert_eq!((&mode["mode"], &mode["since"]), (&"redis_away".into(), &"1970-01-01T00:00:00Z".into()));
    assert_eq!(mode["reason"], "connection refused by 127.0.0.1:6379");
    assert!(mode["what_goes_on"].as_str().unwrap().contains("by the ledger"));
    server.stop();
}

#[test]
fn a_health_that_hangs_is_a_503_in_time() {
    let server = Server::start(None, None);
    *server.told.hangs.lock().unwrap() = true;
    let answer = server.get("/healthz");
    assert_eq!((answer.status, &answer.json()["status"]), (503, &"down".into()));
    assert_eq!(server.get("/workers").status, 504);
    assert_eq!(server.get("/livez").status, 200, "the process itself answers");
}

#[test]
fn z_01_with_a_token_everything_but_health_needs_it() {
    let server = Server::start(Some(TOKEN), None);
    *server.told.health.lock().unwrap() = well();
    server.told.health.lock().unwrap().dependencies[0] = Dependency::down("ledger", "refused by db.internal:3306");
    for path in ["/", "/metrics", "/workers", "/jobs", "/jobs/pending", "/nothing", "/healthz/../workers", "//healthz"]
    {
        for header in ["", "Bearer", "Bearer ", "Bearer default", "Bearer admin", "Basic YWRtaW46", &TOKEN[1..], TOKEN]
        {
            let answer = server.request("GET", path, &[("authorization", header)]);
            assert_eq!(answer.status, 401, "{path} {header}");
            assert_eq!(answer.header("www-authenticate"), "Bearer realm=\"shardcron\"");
            assert!(!answer.body.contains(TOKEN));
        }
        assert_eq!(server.get(path).status, 401, "no header at all");
        assert_eq!(server.request("POST", path, &[]).status, 401, "before anything else is looked at");
    }
    let right = format!("Bearer {TOKEN}");
    assert_eq!(server.request("GET", "/workers", &[("authorization", &right)]).status, 200);
    let open = server.get("/healthz");
    assert_eq!(open.status, 503);
    assert!(!open.body.contains("db.internal") && open.body.contains("\"ledger\""), "{}", open.body);
    let full = server.request("GET", "/healthz", &[("authorization", &right)]);
    assert!(full.body.contains("db.internal"), "{}", full.body);
}

#[test]
fn z_01_an_open_address_without_a_token_is_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let options = WebOptions::new(SocketAddr::from(([0, 0, 0, 0], 0)));
    let refused = runtime.block_on(serve(options.clone(), Arc::new(Told::default()))).unwrap_err();
    assert!(matches!(&refused, WebError::Refused(sentence) if sentence.contains("127.0.0.1")), "{refused}");
    let secret = WebOptions { token: Some(TOKEN.into()), ..options };
    assert!(!format!("{secret:?}").contains(TOKEN), "Z-05");
    runtime.block_on(async { serve(secret, Arc::new(Told::default())).await.unwrap().shutdown().await });
}

#[test]
fn a_page_under_another_name_gets_nothing_from_a_server_without_a_token() {
    let server = Server::start(None, None);
    assert_eq!(server.request("GET", "/workers", &[("host", "evil.test")]).status, 403);
    assert_eq!(server.request("GET", "/healthz", &[("host", "evil.test")]).status, 403);
    assert_eq!(server.request("GET", "/workers", &[("host", "localhost:8081")]).status, 200);
}

#[test]
fn only_get_and_head_and_always_the_headers() {
    let server = Server::start(None, None);
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        let answer = server.request(method, "/workers", &[]);
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.json()["error"].as_str().unwrap().contains("GET"));
        assert_eq!(answer.header("allow"), "GET, HEAD");
    }
    let head = server.request("HEAD", "/workers", &[]);
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    for (path, status) in [("/", 200), ("/workers", 200), ("/metrics", 404), ("/nothing", 404)] {
        let answer = server.get(path);
        assert_eq!(answer.status, status, "{path}");
        assert_eq!(answer.header("x-content-type-options"), "nosniff");
        assert!(answer.header("content-security-policy").starts_with("default-src 'none'"));
        assert_eq!(answer.header("cache-control"), "no-store");
    }
    assert!(server.get("/nothing").json()["error"].as_str().unwrap().contains("GET /"));
    let address = server.handle.local_addr();
    let long = server.raw(&format!("GET /workers HTTP/1.1\r\nhost: {address}\r\ncontent-length: 9999999\r\n\r\n"));
    assert!(long.starts_with("HTTP/1.1 413"), "{long}");
    let path = server.get(&format!("/{}", "x".repeat(4_000)));
    assert_eq!(path.status, 414);
}

#[test]
fn workers_by_their_state() {
    let server = Server::start(None, None);
    let seen = |n: u128, name: &str, age_ms: i64, draining: bool| SeenWorker {
        beat: WorkerBeat {
            incarnation: Incarnation(uuid::Uuid::from_u128(n)),
            name: name.into(),
            host: "host".into(),
            pid: 4,
            version: "0.1.0".into(),
            started_ms: 0,
            tiers: vec![("core".into(), 8), ("bulk".into(), 2)],
            running: 3,
            draining,
            progress: Vec::new(),
            hot_keys: Vec::new(),
            modes: vec![],
        },
        age_ms,
    };
    *server.told.workers.lock().unwrap() =
        vec![seen(3, "c", 15_001, true), seen(2, "b", 10, true), seen(1, "a", 15_000, false)];
    let json = server.get("/workers").json();
    let states: Vec<_> = json["workers"].as_array().unwrap().iter().map(|w| (&w["name"], &w["state"])).collect();
    assert_eq!(
        states,
        [(&"a".into(), &"alive".into()), (&"b".into(), &"draining".into()), (&"c".into(), &"lost".into())]
    );
    assert_eq!((&json["alive"], &json["draining"], &json["lost"]), (&1.into(), &1.into(), &1.into()));
    assert_eq!(json["workers"][0]["tiers"]["core"], 8);
    assert_eq!((&json["workers"][0]["running"], &json["workers"][0]["age_ms"]), (&3.into(), &15_000.into()));

    *server.told.store_away.lock().unwrap() = true;
    let answer = server.get("/workers");
    assert_eq!(answer.status, 503);
    assert!(answer.json()["error"].as_str().unwrap().contains("not reachable"));
}

#[test]
fn pending_by_tier_and_execution() {
    let server = Server::start(None, None);
    let id = ExecutionId(uuid::Uuid::from_u128(9));
    let tier =
        TierOverview { tier: "core".into(), executions: 1, waiting: 5, running: 2, oldest_waiting_ms: Some(1_000) };
    let ahead = TierOverview { tier: "bulk".into(), oldest_waiting_ms: Some(i64::MAX), ..tier.clone() };
    let execution =
        ActiveExecution { id, tier: "core".into(), shards_total: 8, materialized: 8, dispatched: 4, ended: 1 };
    *server.told.pending.lock().unwrap() = Pending {
        overview: Overview { tiers: vec![tier, ahead], dead: 2 },
        executions: vec![PendingExecution { execution, job: Some("reconcile".into()), fired_ms: Some(0) }],
        executions_total: 1,
    };
    let json = server.get("/jobs/pending").json();
    assert_eq!((&json["tiers"][0]["waiting"], &json["tiers"][0]["running"]), (&5.into(), &2.into()));
    assert!(json["tiers"][0]["oldest_wait_ms"].as_i64().unwrap() > 1_000_000);
    assert_eq!(json["tiers"][1]["oldest_wait_ms"], 0, "another host's clock is ahead");
    assert_eq!((&json["dead_letters"], &json["executions_total"]), (&2.into(), &1.into()));
    let execution = &json["executions"][0];
    assert_eq!((&execution["job"], &execution["shards_ended"]), (&"reconcile".into(), &1.into()));
    assert_eq!(
        (&execution["execution"], &execution["fired"]),
        (&id.to_string().into(), &"1970-01-01T00:00:00Z".into())
    );
}

#[test]
fn a_05_an_instant_in_the_past_is_flagged_with_the_reason() {
    let server = Server::start(None, None);
    let job = |name: &str, next_fire_ms: Option<i64>, paused_by: Option<&str>| JobRecord {
        id: JobId(1),
        name: name.into(),
        version: 1,
        spec: Err("handler: unknown key 'shell'".into()),
        paused_by: paused_by.map(str::to_owned),
        next_fire_ms,
        owed: Vec::new(),
    };
    *server.told.jobs.lock().unwrap() = vec![
        job("late", Some(1_000), None),
        job("paused", Some(1_000), Some("me")),
        job("soon", Some(i64::MAX / 4), None),
    ];
    *server.told.health.lock().unwrap() =
        Health { leading: false, leader: Some(Leader { alive: Some(false), ..well().leader.unwrap() }), ..well() };
    let json = server.get("/jobs").json();
    assert!(json["jobs"][0]["overdue"].as_str().unwrap().ends_with("no leader"));
    assert_eq!((&json["jobs"][1]["overdue"], &json["jobs"][2]["overdue"]), (&Value::Null, &Value::Null));
    assert!(json["jobs"][0]["error"].as_str().unwrap().contains("shell"));
    let health = server.get("/healthz").json();
    assert_eq!(health["status"], "degraded");
    assert!(health["problems"][0].as_str().unwrap().contains("no leader"));
}

#[test]
fn metrics_as_prometheus_reads_them() {
    let recorder = build_recorder().unwrap();
    metrics::with_local_recorder(&recorder, || {
        shardcron_web::metric_definitions::describe();
        metrics::gauge!(metric_names::SHARDS_WAITING, metric_names::LABEL_TIER => "core").set(12.0);
    });
    let server = Server::start(None, Some(recorder.handle()));
    let answer = server.get("/metrics");
    assert_eq!(answer.status, 200);
    assert!(answer.header("content-type").starts_with("text/plain; version=0.0.4"));
    assert!(answer.body.contains("shardcron_shards_waiting{tier=\"core\"} 12"), "{}", answer.body);
    assert!(answer.body.contains("# TYPE shardcron_shards_waiting gauge"));
}

#[test]
fn the_recorder_is_installed_once_and_kept_small() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let handle = shardcron_web::install_metrics(runtime.handle()).unwrap();
    metrics::counter!(metric_names::REFUSED, metric_names::LABEL_REASON => "terminal", metric_names::LABEL_AT => "claim")
        .increment(1);
    assert!(
        handle.render().contains("shardcron_refused_total{reason=\"terminal\",at=\"claim\"} 1"),
        "{}",
        handle.render()
    );
    let again = shardcron_web::install_metrics(runtime.handle()).unwrap_err();
    assert!(matches!(again, WebError::Metrics(_)), "{again}");
}

/// Who waits for one answer, under one address.
#[derive(Default)]
struct Waits(Mutex<Vec<(String, Vec<u8>)>>);

impl CallbackDesk for Waits {
    fn admit(&self, token: &str) -> Result<usize, (u16, String)> {
        if token == "good" { Ok(10) } else { Err((410, "nobody waits here".into())) }
    }

    fn take(&self, _: &str, kind: &str, body: &[u8]) -> (u16, String) {
        self.0.lock().unwrap().push((kind.to_owned(), body.to_vec()));
        (202, "taken".into())
    }
}

#[test]
fn callbacks_pass_by_their_address_alone_and_nothing_else_is_taken_in() {
    let desk = Arc::new(Waits::default());
    let server = Server::with(|options| {
        options.token = Some(TOKEN.into());
        options.callbacks = Some(desk.clone());
    });
    let post = |path: &str, body: &str| {
        let address = server.handle.local_addr();
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut response = agent
            .post(format!("http://{address}{path}"))
            .header("host", "worker.example")
            .send(body)
            .unwrap_or_else(|e| panic!("{path}: {e}"));
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    };
    // Neither the server's token nor a loopback name is needed.
    assert_eq!(post("/callbacks/good", "1234567890").0, 202);
    assert_eq!(post("/callbacks/good/fail", "{}").0, 202);
    let (status, body) = post("/callbacks/old", "x");
    assert!(status == 410 && body.contains("nobody waits here"), "{status} {body}");
    let (status, body) = post("/callbacks/good", "12345678901");
    assert!(status == 413 && body.contains("10 bytes"), "{status} {body}");
    for path in ["/callbacks/", "/callbacks/good/fail/more"] {
        assert_eq!(post(path, "").0, 404, "{path}");
    }
    assert_eq!((post("/workers", "").0, post("/healthz", "").0), (401, 405), "and nothing else");
    let taken = [("".to_owned(), b"1234567890".to_vec()), ("fail".to_owned(), b"{}".to_vec())];
    assert_eq!(*desk.0.lock().unwrap(), taken);
    assert_eq!(server.get("/callbacks/good").status, 405);
}

#[test]
fn a_process_without_handlers_takes_no_callbacks() {
    let server = Server::with(|_| {});
    let address = server.handle.local_addr();
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let status = agent.post(format!("http://{address}/callbacks/good")).send("x").unwrap().status().as_u16();
    assert_eq!(status, 404);
}
