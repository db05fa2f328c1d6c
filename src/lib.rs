//! The program: command line, configuration, wiring. The only place that names concrete adapters; no scheduling logic.

mod allowed;
mod cache_config;
pub mod cli;
mod commands;
pub mod config;
pub mod databases;
mod demo;
mod health;
mod output;
mod serve;
mod stand_in;
mod wiring;

pub use cli::run_with;
pub use demo::data::{Loaded, load as load_example};
