//! Tests of libraries that are not a usable NCCL, and of a real NCCL library.

use std::env;
use std::thread;
use std::time::Duration;

use burn_megatron_test_support::{skipped, skipped_in_part};

use super::super::api::UniqueId;
use super::super::library::{InitRequest, Library, LibraryError, Progress};
use super::super::opening;
use super::super::version::Version;
use super::fake_nccl::{api, v2_13, v2_16, v2_27};
use super::harness::{TestRun, TestSetup};
use crate::nccl_config::{NcclGroup, NcclGroupConfig};
use burn_megatron_probe::cuda_driver;

fn names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} does not name {part:?}");
    }
}

#[test]
fn a_library_that_is_missing_says_where_to_get_it() {
    let error = Library::open_first(&["libnccl-that-is-not-there.so.2"]).unwrap_err();
    names(
        &error.to_string(),
        &[
            "libnccl.so.2",
            "pip install nvidia-nccl-cu13",
            "apt-get install libnccl2",
            "LD_LIBRARY_PATH",
        ],
    );
}

/// The C library exists on every test machine and is not NCCL.
#[cfg(target_os = "linux")]
#[test]
fn a_library_without_a_function_names_it() {
    let error = Library::open_first(&["libc.so.6"]).unwrap_err();
    names(&error.to_string(), &["libc.so.6", "ncclGetVersion"]);
}

#[test]
fn a_library_that_is_too_old_names_both_versions() {
    let error = Library::from_api(api(v2_13), "libnccl.so.2".into()).unwrap_err();
    names(
        &error.to_string(),
        &[
            "NCCL 2.13.4",
            "expected at least 2.14.0",
            "abort a communicator",
        ],
    );
    let library = Library::from_api(api(v2_27), "x".into()).unwrap();
    assert_eq!(library.version(), Version::new(2, 27, 3));
    assert_eq!(format!("{library:?}"), "NCCL 2.27.3 (x)");
}

#[test]
fn ctas_that_a_version_does_not_have_are_refused() {
    const GROUPS: [(NcclGroup, NcclGroupConfig); 1] = [(
        NcclGroup::Data,
        NcclGroupConfig {
            min_ctas: None,
            max_ctas: Some(16),
            high_priority_stream: None,
        },
    )];
    let setup = TestSetup {
        version: v2_16,
        groups: &GROUPS,
        ..TestSetup::default()
    };
    let error = TestRun::new(1, setup).start(0).unwrap_err().to_string();
    let expected = "min_ctas and max_ctas of nccl.groups.data are not supported by NCCL 2.16.2: update NCCL to at \
                    least 2.17.1, or remove them";
    assert!(error.ends_with(expected), "{error}");
}

/// Opens a real NCCL library. An environment variable contains its path. This test requires no GPU.
#[test]
fn the_real_library_has_all_functions() {
    let Ok(path) = env::var("BURN_MEGATRON_TEST_LIBNCCL") else {
        skipped("BURN_MEGATRON_TEST_LIBNCCL does not name a libnccl.so.2");
        return;
    };
    let library = match Library::open_first(&[&path]) {
        Ok(library) => library,
        Err(error @ LibraryError::TooOld { .. }) => panic!("{error}; name a newer one"),
        Err(error) => panic!("{error}"),
    };
    println!("{library:?}");
    assert_eq!(library.can_split(), library.version() >= Version::SPLIT);
    let (windows, plain) = library.registration();
    assert_eq!(windows, library.version() >= Version::WINDOWS);
    assert_eq!(plain, library.version() >= Version::REGISTER);
    if cuda_driver().is_ok_and(|driver| driver.devices > 0) {
        skipped_in_part("this machine has a GPU: a communicator would be created");
        return;
    }
    // Without a GPU, unique ids can be created, but communicators cannot.
    let id = library.unique_id().unwrap();
    assert_ne!(id, library.unique_id().unwrap());
    let message = init_without_gpu(&library, id);
    println!("{message}");
    assert!(message.starts_with("ncclCommInitRankConfig: "), "{message}");
    assert!(!message.contains('\n'), "{message}");
}

/// Returns the error of initializing a communicator of one rank.
fn init_without_gpu(library: &Library, id: UniqueId) -> String {
    let slot = opening::slot();
    let request = InitRequest {
        id,
        rank: 0,
        size: 1,
        config: NcclGroupConfig::default(),
        slot: &slot,
    };
    let comm = match library.init(&[request]) {
        Err(message) => return message,
        Ok(comms) => comms[0],
    };
    loop {
        match library.poll(comm) {
            Ok(Progress::Running) => thread::sleep(Duration::from_millis(1)),
            Ok(Progress::Done) => panic!("a communicator without a GPU"),
            Err(message) => return format!("ncclCommInitRankConfig: {message}"),
        }
    }
}
