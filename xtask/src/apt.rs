//! Installs packages on Debian and its derivatives.

use std::fs;
use std::process::Command;

use crate::process::run;

/// Returns whether the system is Debian or a derivative and the process runs as root.
pub fn may_install() -> bool {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    is_debian(&read("/etc/os-release")) && is_root(&read("/proc/self/status"))
}

/// Returns whether an os-release text describes Debian, Ubuntu or a derivative.
fn is_debian(os_release: &str) -> bool {
    os_release
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(key, _)| matches!(key.trim(), "ID" | "ID_LIKE"))
        .flat_map(|(_, value)| value.trim().trim_matches(['"', '\'']).split_whitespace())
        .any(|id| matches!(id, "debian" | "ubuntu"))
}

/// Returns whether a `/proc/self/status` text describes a process that runs as root: the effective user id, its
/// second user id, is 0.
fn is_root(status: &str) -> bool {
    status
        .lines()
        .filter_map(|line| line.strip_prefix("Uid:"))
        .any(|ids| ids.split_whitespace().nth(1) == Some("0"))
}

/// Installs packages and their dependencies.
pub fn install(packages: &[&str]) -> Result<(), String> {
    // Another apt-get may hold the lock: waits for it, with a timeout.
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
            .args(args)
            .args(["-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=3"]);
        run(&mut command)
    };
    apt(&["update"])?;
    apt(&[&["install", "-y", "--no-install-recommends"], packages].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_of_debian_are_known() {
        assert!(is_debian("NAME=\"Debian GNU/Linux\"\nID=debian\n"));
        assert!(is_debian("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"));
        assert!(is_debian("ID='pop'\nID_LIKE='ubuntu'\n"));
        assert!(!is_debian(
            "ID=fedora\nHOME_URL=\"https://example.org/debian\"\n"
        ));
        assert!(!is_debian("VERSION_ID=debian\nID=arch\n"));
        assert!(!is_debian(""));
    }

    #[test]
    fn root_is_told_by_the_effective_user() {
        assert!(is_root("Name:\txtask\nUid:\t1000\t0\t0\t0\n"));
        assert!(!is_root("Uid:\t0\t1000\t0\t0\n"));
        assert!(!is_root(""));
    }
}
