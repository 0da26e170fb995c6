use std::fs;
use std::process::Command;

use tempfile::{TempDir, tempdir};

use super::*;

#[test]
fn versions_of_nccl_are_read_old_and_new() {
    assert_eq!(nccl_version(22_303), (2, 23, 3));
    assert_eq!(nccl_version(23_007), (2, 30, 7));
    assert_eq!(nccl_version(20_905), (2, 9, 5));
    assert_eq!(nccl_version(2_804), (2, 8, 4));
}

/// Probes must be safe on any machine.
#[test]
fn what_is_missing_is_named() {
    match nccl() {
        Ok(library) => assert!(library.version.0 >= 2, "{library:?}"),
        Err(reason) => assert!(
            NCCL_NAMES.iter().all(|name| reason.contains(name)),
            "{reason}"
        ),
    }
    match cuda_driver() {
        Ok(driver) => assert!(driver.version.0 > 0, "{driver:?}"),
        Err(reason) => assert!(reason.to_lowercase().contains("cuda"), "{reason}"),
    }
    match mpirun() {
        Ok(program) => assert!(program.path.is_file() && !program.version.is_empty()),
        Err(reason) => assert!(reason.contains("mpirun"), "{reason}"),
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use super::*;
    use std::os::unix::fs::symlink;

    fn library(folder: &TempDir, name: &str, source: &str) -> String {
        let (code, library) = (folder.path().join("fake.c"), folder.path().join(name));
        fs::write(&code, source).unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &code])
            .status();
        assert!(built.unwrap().success());
        library.to_str().unwrap().into()
    }

    #[test]
    fn the_first_library_that_answers_counts() {
        let folder = tempdir().unwrap();
        let good = "int ncclGetVersion(int *v) { *v = 22303; return 0; }";
        let good = library(&folder, "libgood.so", good);
        let failing = library(
            &folder,
            "libfailing.so",
            "int ncclGetVersion(int *v) { return 3; }",
        );
        let other = library(&folder, "libother.so", "int f(void) { return 0; }");
        // The path is the path of the file, not of the link that was opened.
        let link = folder.path().join("liblink.so");
        symlink(&good, &link).unwrap();
        let names = [
            "libnot-there.so.2",
            &other,
            &failing,
            link.to_str().unwrap(),
        ];
        let found = first_nccl(&names).unwrap();
        assert_eq!(found.version, (2, 23, 3));
        assert_eq!(found.path, fs::canonicalize(&good).unwrap());
        let reason = first_nccl(&["libnot-there.so.2", &other, &failing]).unwrap_err();
        assert!(reason.contains("libnot-there.so.2"), "{reason}");
        assert!(reason.contains("ncclGetVersion"), "{reason}");
        let error = format!("{failing}: ncclGetVersion reports error 3");
        assert!(reason.contains(&error), "{reason}");
    }

    /// Creates a program. A separate process writes the file. If this process had the file open, a child process of
    /// another test could inherit the file descriptor. A program that is open for writing cannot be started.
    fn script(folder: &TempDir, name: &str, text: &str) -> PathBuf {
        let path = folder.path().join(name);
        let written = Command::new("sh")
            .args(["-c", "printf %s \"$2\" >\"$1\" && chmod +x \"$1\"", "sh"])
            .args([path.as_os_str(), OsStr::new(text)])
            .status();
        assert!(written.unwrap().success());
        path
    }

    #[test]
    fn programs_are_looked_for_in_order() {
        let (first, second) = (tempdir().unwrap(), tempdir().unwrap());
        fs::write(first.path().join("mpirun"), "no program").unwrap();
        let program = script(&second, "mpirun", "#!/bin/sh\n");
        let folders = env::join_paths([first.path(), second.path()]).unwrap();
        assert_eq!(find(&folders, "mpirun"), Some(program));
        assert_eq!(find(&folders, "mpiexec"), None);
        assert_eq!(find(OsStr::new(""), "mpirun"), None);
    }

    #[test]
    fn a_version_is_the_first_line() {
        let folder = tempdir().unwrap();
        let text = "#!/bin/sh\n[ \"$1\" = --version ] && printf '\\nmpirun (Open MPI) 4.1.4\\n\\nmore\\n'\n";
        let output = version_of(&script(&folder, "good", text), VERSION_TIMEOUT);
        assert_eq!(output.unwrap(), "mpirun (Open MPI) 4.1.4");
        let silent = version_of(
            &script(&folder, "silent", "#!/bin/sh\nexit 1\n"),
            VERSION_TIMEOUT,
        );
        assert!(
            silent
                .unwrap_err()
                .ends_with("silent --version prints nothing")
        );
        let broken = version_of(
            &script(&folder, "broken", "#!/no/such/shell\n"),
            VERSION_TIMEOUT,
        );
        assert!(broken.unwrap_err().contains("broken: "));
    }

    #[test]
    fn a_program_that_does_not_answer_is_ended() {
        let folder = tempdir().unwrap();
        let hang = script(&folder, "hang", "#!/bin/sh\nexec sleep 100000\n");
        let reason = version_of(&hang, Duration::from_millis(200)).unwrap_err();
        assert!(
            reason.ends_with("hang --version has not exited after 0.2 s"),
            "{reason}"
        );
    }
}
