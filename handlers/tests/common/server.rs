//! A server of HTTP/1.1 on this machine that answers what the test says.

use shardcron_domain::http_call::HttpSpec;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a server saw.
#[derive(Clone, Debug)]
pub struct Seen {
    pub line: String,
    pub head: String,
    pub body: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|l| l.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v))
    }
}

/// A server of HTTP/1.1 that gives its answers in turn, each to one connection; the last one for ever. An empty answer: it reads the
/// request and says nothing.
pub struct Server {
    pub url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub async fn answering(answers: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut answers: VecDeque<String> = answers.iter().map(|a| a.replace("{url}", &url)).collect();
        let (log, mut open) = (seen.clone(), tokio::task::JoinSet::new());
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let answer = if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() };
                open.spawn(serve(stream, answer, log.clone()));
            }
        });
        Server { url, seen, task }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn spec(&self, more: &str) -> HttpSpec {
        serde_json::from_str(&format!(
            r#"{{"url":"{}/settle","poll":{{"first":"50ms","max":"50ms"}}{more}}}"#,
            self.url
        ))
        .unwrap()
    }
}

async fn serve(mut stream: TcpStream, answer: String, log: Arc<Mutex<Vec<Seen>>>) {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    let seen = loop {
        let length = stream.read(&mut buffer).await.unwrap_or(0);
        if length == 0 {
            return;
        }
        all.extend_from_slice(&buffer[..length]);
        let text = String::from_utf8_lossy(&all).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let (line, head) = head.split_once("\r\n").unwrap();
        let seen = Seen { line: line.into(), head: head.replace("\r\n", "\n"), body: body.into() };
        let wanted = seen.header("content-length").map_or(0, |n| n.parse().unwrap());
        if body.len() >= wanted {
            break seen;
        }
    };
    log.lock().unwrap().push(seen);
    if answer.is_empty() {
        // Until the other side gives up.
        let _ = stream.read(&mut buffer).await;
        return;
    }
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.shutdown().await;
}

pub fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}
