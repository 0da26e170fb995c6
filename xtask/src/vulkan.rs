//! Finds or installs a Vulkan driver for wgpu.
//!
//! Vulkan needs the loader `libvulkan.so.1`, and a JSON file for each driver that describes it. If `VK_DRIVER_FILES`
//! (older name: `VK_ICD_FILENAMES`) is set, the loader reads the files of this variable. Otherwise it reads folders
//! named `vulkan/icd.d`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::apt;

const DRIVER: &str =
    "a driver description (*.json in /usr/share/vulkan/icd.d, or named by VK_DRIVER_FILES)";
const LOADER: &str = "the loader libvulkan.so.1";

const PACKAGES: &[&str] = &["mesa-vulkan-drivers", "libvulkan1"];

/// Mesa's drivers include a CPU driver, so a machine without a GPU can run the tests.
const ADVICE: &str = "
  Debian, Ubuntu:  sudo apt-get install mesa-vulkan-drivers libvulkan1
  Fedora:          sudo dnf install mesa-vulkan-drivers vulkan-loader
  Arch:            sudo pacman -S vulkan-swrast vulkan-icd-loader
  Alpine:          sudo apk add mesa-vulkan-swrast vulkan-loader";

const DRIVER_FOLDERS: &[&str] = &[
    "usr/share/vulkan/icd.d",
    "usr/local/share/vulkan/icd.d",
    "etc/vulkan/icd.d",
    "usr/local/etc/vulkan/icd.d",
];

const LIBRARY_FOLDERS: &[&str] = &["lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib"];

/// Finds a driver, or installs one where possible. The error lists the missing parts and how to install them.
pub fn find_or_install() -> Result<(), String> {
    if matches!(env::consts::OS, "macos" | "windows") {
        println!("{} brings its own graphics drivers", env::consts::OS);
        return Ok(());
    }
    let system = System::here();
    let missing = system.missing();
    if missing.is_empty() {
        println!("found a driver description and the loader");
        return Ok(());
    }
    if !apt::may_install() {
        return Err(explain(&missing));
    }
    apt::install(PACKAGES).map_err(|reason| format!("{}\n{reason}", explain(&missing)))?;
    let missing = system.missing();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(explain(&missing))
    }
}

fn explain(missing: &[&str]) -> String {
    format!(
        "no Vulkan driver: missing {}{ADVICE}",
        missing.join(" and ")
    )
}

/// The folders that are searched for the loader and the drivers.
struct System {
    root: PathBuf,
    driver_files: Option<OsString>,
    library_path: OsString,
}

impl System {
    fn here() -> Self {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty());
        Self {
            root: PathBuf::from("/"),
            driver_files: set("VK_DRIVER_FILES").or_else(|| set("VK_ICD_FILENAMES")),
            library_path: set("LD_LIBRARY_PATH").unwrap_or_default(),
        }
    }

    /// Returns the missing parts. The list is empty if a driver can be used.
    fn missing(&self) -> Vec<&'static str> {
        let mut missing = Vec::new();
        if !self.has_driver() {
            missing.push(DRIVER);
        }
        if !self.has_loader() {
            missing.push(LOADER);
        }
        missing
    }

    fn has_driver(&self) -> bool {
        match &self.driver_files {
            Some(paths) => env::split_paths(paths).any(|path| path.is_file() || has_json(&path)),
            None => DRIVER_FOLDERS
                .iter()
                .any(|folder| has_json(&self.root.join(folder))),
        }
    }

    fn has_loader(&self) -> bool {
        let holds_loader = |folder: &Path| folder.join("libvulkan.so.1").exists();
        let given = env::split_paths(&self.library_path).any(|folder| holds_loader(&folder));
        given
            || LIBRARY_FOLDERS
                .iter()
                .map(|folder| self.root.join(folder))
                .any(|folder| {
                    // Debian keeps libraries in a subfolder for the architecture.
                    holds_loader(&folder) || entries(&folder).any(|inner| holds_loader(&inner))
                })
    }
}

fn has_json(folder: &Path) -> bool {
    entries(folder).any(|path| path.extension().is_some_and(|end| end == "json"))
}

/// Returns the paths in a folder, or no paths if the folder does not exist.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    fn system(root: &TempDir) -> System {
        System {
            root: root.path().into(),
            driver_files: None,
            library_path: OsString::new(),
        }
    }

    #[test]
    fn a_driver_and_the_loader_are_both_needed() {
        let root = TempDir::new("vulkan").unwrap();
        assert_eq!(system(&root).missing(), [DRIVER, LOADER]);
        root.write("etc/vulkan/icd.d/notes.txt", "");
        root.write("usr/lib/x86_64-linux-gnu/libvulkan.so.1", "");
        assert_eq!(system(&root).missing(), [DRIVER]);
        root.write("etc/vulkan/icd.d/lvp_icd.x86_64.json", "{}");
        assert!(system(&root).missing().is_empty());
    }

    #[test]
    fn variables_name_other_places() {
        let root = TempDir::new("vulkan").unwrap();
        root.write("mine/lvp.json", "{}");
        root.write("libraries/libvulkan.so.1", "");
        let mut system = system(&root);
        system.library_path = root.path().join("libraries").into();
        assert_eq!(system.missing(), [DRIVER]);
        system.driver_files = Some(root.path().join("mine/lvp.json").into());
        assert!(system.missing().is_empty());
    }

    #[test]
    fn the_variable_overrides_the_folders() {
        let root = TempDir::new("vulkan").unwrap();
        root.write("usr/share/vulkan/icd.d/lvp.json", "{}");
        root.write("usr/lib64/libvulkan.so.1", "");
        let mut system = system(&root);
        assert!(system.missing().is_empty());
        system.driver_files = Some(root.path().join("no-such.json").into());
        assert_eq!(system.missing(), [DRIVER]);
    }
}
