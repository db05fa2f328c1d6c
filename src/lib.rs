//! The program: command line, configuration, wiring. The only place that names concrete adapters; no scheduling logic.

pub mod cli;
mod commands;
pub mod config;
mod demo;
mod health;
mod output;
mod serve;
mod stand_in;
mod wiring;

pub use cli::run_with;
