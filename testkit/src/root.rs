//! Owns where a service's programs come from: this machine, or another root folder entered by `chroot`.
//!
//! A second root (made by debootstrap, say) is how other versions of the services are tested on one machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::process::guard_folder;

/// The name prefix of every folder this crate makes; the watchdog deletes nothing else.
pub(crate) const FOLDER_PREFIX: &str = "shardcron-test-";

const USUAL_FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

#[derive(Debug, Clone)]
pub(crate) struct Root {
    folder: Option<PathBuf>,
}

impl Root {
    /// The root for `service` (`RABBITMQ`, `REDIS`, `SQL`): `SHARDCRON_TEST_<SERVICE>_CHROOT`, else
    /// `SHARDCRON_TEST_CHROOT`, else this machine. An empty value means this machine, too.
    pub fn of(service: &str) -> Self {
        let folder = std::env::var_os(format!("SHARDCRON_TEST_{service}_CHROOT"))
            .or_else(|| std::env::var_os("SHARDCRON_TEST_CHROOT"))
            .filter(|value| !value.is_empty() && value != "/")
            .map(PathBuf::from);
        Self { folder }
    }

    /// The program named by the variable `SHARDCRON_TEST_<service>_SERVER`, else the first candidate that exists. A
    /// candidate with a slash is a path, one without is looked up in the usual folders.
    pub fn find_server(&self, service: &str, candidates: &[&str]) -> Result<String> {
        let variable = format!("SHARDCRON_TEST_{service}_SERVER");
        match std::env::var(&variable) {
            Ok(path) if !path.is_empty() => {
                self.find(&[path.as_str()]).with_context(|| format!("{variable} names {path}"))
            }
            _ => self.find(candidates).with_context(|| format!("install it, or name it in {variable}")),
        }
    }

    /// The first candidate that exists, as a path inside this root.
    pub fn find(&self, candidates: &[&str]) -> Result<String> {
        let search = self.search_folders();
        for candidate in candidates {
            let paths = if candidate.contains('/') {
                vec![(*candidate).to_owned()]
            } else {
                search.iter().map(|folder| format!("{folder}/{candidate}")).collect()
            };
            // Not `exists()`: an absolute link inside another root leads elsewhere when seen from here.
            if let Some(path) = paths.into_iter().find(|path| self.outside(path).symlink_metadata().is_ok()) {
                return Ok(path);
            }
        }
        bail!("no program {} in {}", candidates.join(" or "), self.describe())
    }

    /// A command for the program at `path` inside this root, with a clean environment: nothing of the caller's
    /// `RABBITMQ_*`, `MYSQL_*` or `ERL_*` settings may leak into a private server.
    pub fn command(&self, path: &str) -> Command {
        let mut words = self.words(path).into_iter();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        self.clean_environment(&mut command);
        command
    }

    /// The words that start the program: `path`, behind `chroot` where needed.
    pub fn words(&self, path: &str) -> Vec<String> {
        match &self.folder {
            Some(folder) => vec!["chroot".to_owned(), folder.display().to_string(), path.to_owned()],
            None => vec![path.to_owned()],
        }
    }

    pub fn clean_environment(&self, command: &mut Command) {
        let mut path = self.search_folders();
        path.dedup();
        command.env_clear().env("PATH", path.join(":")).env("LANG", "C.UTF-8");
        if let Some(libraries) = std::env::var_os("LD_LIBRARY_PATH") {
            command.env("LD_LIBRARY_PATH", libraries);
        }
    }

    /// A new private folder that the programs of this root can reach; gone with the value, and gone if we are killed.
    pub fn private_folder(&self) -> Result<TempDir> {
        let base = match &self.folder {
            Some(folder) => folder.join("tmp"),
            None => std::env::temp_dir(),
        };
        let folder = tempfile::Builder::new()
            .prefix(FOLDER_PREFIX)
            .tempdir_in(&base)
            .with_context(|| format!("making a private folder in {}", base.display()))?;
        guard_folder(folder.path())?;
        Ok(folder)
    }

    /// `path` (seen from this process) as the programs of this root see it.
    pub fn inside(&self, path: &Path) -> String {
        let relative = self.folder.as_ref().and_then(|folder| path.strip_prefix(folder).ok());
        match relative {
            Some(relative) => format!("/{}", relative.display()),
            None => path.display().to_string(),
        }
    }

    /// A short text that tells this root from others, for names of cached files.
    pub fn describe(&self) -> String {
        self.folder.as_ref().map_or_else(|| "this machine".to_owned(), |folder| folder.display().to_string())
    }

    fn outside(&self, path: &str) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join(path.trim_start_matches('/')),
            None => PathBuf::from(path),
        }
    }

    fn search_folders(&self) -> Vec<String> {
        let mut folders = Vec::new();
        if self.folder.is_none() {
            let path = std::env::var("PATH").unwrap_or_default();
            folders.extend(path.split(':').filter(|folder| folder.starts_with('/')).map(str::to_owned));
        }
        folders.extend(USUAL_FOLDERS.map(str::to_owned));
        folders
    }
}
