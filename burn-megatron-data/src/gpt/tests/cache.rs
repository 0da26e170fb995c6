use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::{
    GptDataset, GptOptions, IndexCache, NpyArray, NpyType, SamplingError, SplitPart,
};
use crate::fixtures::open;
use crate::{DataError, Samples};
use burn_megatron_test_support::TestFolder;

fn description() -> Value {
    json!({"what": "numbers", "count": 3})
}

/// Returns two arrays, and counts how often they are built.
fn build(built: &AtomicUsize) -> Result<Vec<(&'static str, NpyArray)>, DataError> {
    built.fetch_add(1, Ordering::SeqCst);
    Ok(vec![
        ("first", NpyArray::new(&[1_i32, -2, 3], &[3])),
        ("second", NpyArray::new(&[7_i64, 8, 9, i64::MAX], &[2, 2])),
    ])
}

fn check(arrays: &[NpyArray]) {
    assert_eq!(arrays[0].iter().collect::<Vec<_>>(), [1, -2, 3]);
    assert_eq!(arrays[1].iter().collect::<Vec<_>>(), [7, 8, 9, i64::MAX]);
    assert_eq!(arrays[1].shape(), [2, 2]);
}

/// Returns the files with this suffix.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .filter(|path| path.to_str().unwrap().ends_with(ending))
        .collect();
    files.sort();
    files
}

#[test]
fn indices_are_built_once() {
    let folder = TestFolder::new();
    let (cache, built) = (
        IndexCache::new(&folder.path().join("new/cache")),
        AtomicUsize::new(0),
    );
    for _ in 0..3 {
        check(&cache.arrays(&description(), || build(&built)).unwrap());
    }
    assert_eq!(built.load(Ordering::SeqCst), 1);
    let other = json!({"what": "numbers", "count": 4});
    cache.arrays(&other, || build(&built)).unwrap();
    assert_eq!(built.load(Ordering::SeqCst), 2);
    let folder = folder.path().join("new/cache");
    assert_eq!(files(&folder, ".npy").len(), 4);
    assert_eq!(files(&folder, ".partial").len(), 0);
}

#[test]
fn one_of_many_builds_and_the_others_wait() {
    let folder = TestFolder::new();
    let (cache, built) = (IndexCache::new(folder.path()), AtomicUsize::new(0));
    let together = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                together.wait();
                let slow = || {
                    thread::sleep(Duration::from_millis(100));
                    build(&built)
                };
                check(&cache.arrays(&description(), slow).unwrap());
            });
        }
    });
    assert_eq!(built.load(Ordering::SeqCst), 1);
}

#[test]
fn what_is_broken_is_built_again() {
    let folder = TestFolder::new();
    let (cache, built) = (IndexCache::new(folder.path()), AtomicUsize::new(0));
    let get = || check(&cache.arrays(&description(), || build(&built)).unwrap());
    get();
    let (arrays, manifest) = (
        files(folder.path(), ".npy"),
        files(folder.path(), ".json").remove(0),
    );
    let breakers: [&dyn Fn(); 7] = [
        &|| flip(&arrays[0], 130),
        &|| flip(&arrays[1], 20),
        &|| {
            File::options()
                .write(true)
                .open(&arrays[1])
                .unwrap()
                .set_len(100)
                .unwrap()
        },
        &|| fs::remove_file(&arrays[0]).unwrap(),
        &|| fs::write(&manifest, "{").unwrap(),
        &|| fs::write(&manifest, r#"{"description": 1, "arrays": []}"#).unwrap(),
        &|| {
            let text = fs::read_to_string(&manifest).unwrap();
            fs::write(
                &manifest,
                text.replace("      3\n", "      18446744073709551615\n"),
            )
            .unwrap();
        },
    ];
    for (number, breaker) in breakers.into_iter().enumerate() {
        breaker();
        get();
        assert_eq!(built.load(Ordering::SeqCst), number + 2, "breaker {number}");
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    // The file was replaced and not overwritten, because a mapped file must not change.
    fs::write(path.with_extension("flipped"), bytes).unwrap();
    fs::rename(path.with_extension("flipped"), path).unwrap();
}

#[test]
fn the_wait_for_another_ends_and_names_it() {
    let folder = TestFolder::new();
    let cache = IndexCache::new(folder.path()).with_wait(Duration::from_millis(100));
    let built = AtomicUsize::new(0);
    let taken = cache.arrays(&description(), || {
        // Another caller requests the same indices while they are built.
        let error = cache.arrays(&description(), || build(&built)).unwrap_err();
        let error = error.to_string();
        let holder = format!("held by process {}", std::process::id());
        assert!(
            error.contains(&holder) && error.contains(".lock"),
            "{error}"
        );
        build(&built)
    });
    check(&taken.unwrap());
    assert_eq!(built.load(Ordering::SeqCst), 1);
}

#[test]
fn one_that_fails_leaves_nothing_and_the_next_can() {
    let folder = TestFolder::new();
    let (cache, built) = (IndexCache::new(folder.path()), AtomicUsize::new(0));
    let failed = cache.arrays(&description(), || Err(SamplingError::Seed(1 << 40).into()));
    assert!(matches!(failed, Err(DataError::Sampling(_))));
    check(&cache.arrays(&description(), || build(&built)).unwrap());
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_is_named() {
    let folder = TestFolder::new();
    folder.write("file", "");
    let cache = IndexCache::new(&folder.path().join("file"));
    let error = cache
        .arrays(&description(), || build(&AtomicUsize::new(0)))
        .unwrap_err()
        .to_string();
    assert!(error.contains("file'"), "{error}");
}

#[test]
fn a_data_set_out_of_the_cache_is_the_same() {
    let folder = TestFolder::new();
    let cache = IndexCache::new(folder.path());
    let dataset = |seed, cache| {
        let (split, options) = ("8,2".parse().unwrap(), GptOptions::new(16, seed));
        let samples = Some(200);
        GptDataset::new(
            open("a"),
            &split,
            SplitPart::Train,
            samples,
            &options,
            cache,
        )
        .unwrap()
    };
    let (built, first, second) = (
        dataset(3, None),
        dataset(3, Some(&cache)),
        dataset(3, Some(&cache)),
    );
    assert_eq!(files(folder.path(), ".npy").len(), 3);
    for number in 0..200 {
        let wanted = built.sample(number).unwrap();
        assert_eq!(first.sample(number).unwrap(), wanted);
        assert_eq!(second.sample(number).unwrap(), wanted);
    }
    dataset(4, Some(&cache));
    assert_eq!(files(folder.path(), ".npy").len(), 6);
}

/// Written by NumPy 2: `numpy.save` of `arange(6, dtype=int32).reshape(3, 2)` and of `array([1], dtype=uint32)`.
#[test]
fn the_files_are_those_of_numpy() {
    let folder = TestFolder::new();
    let numpy = |dict: &str, numbers: &[u8]| {
        let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
        bytes.extend(format!("{dict:<117}\n").into_bytes());
        bytes.extend(numbers);
        bytes
    };
    let numbers: Vec<u8> = (0..6_i32).flat_map(|x| x.to_le_bytes()).collect();
    let two = "{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }";
    let array = NpyArray::new(&[0, 1, 2, 3, 4, 5], &[3, 2]);
    assert_eq!(array.file(), numpy(two, &numbers));
    let one = "{'descr': '<u4', 'fortran_order': False, 'shape': (1,), }";
    assert_eq!(
        NpyArray::new(&[1_u32], &[1]).file(),
        numpy(one, &[1, 0, 0, 0])
    );

    folder.write("x.npy", array.file());
    let path = folder.path().join("x.npy");
    let mapped = NpyArray::open(&path, NpyType::I32, &[3, 2])
        .unwrap()
        .unwrap();
    assert_eq!(mapped.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    for (int_type, shape) in [
        (NpyType::I32, [2, 3]),
        (NpyType::U32, [3, 2]),
        (NpyType::I64, [usize::MAX, 9]),
    ] {
        assert!(NpyArray::open(&path, int_type, &shape).unwrap().is_none());
    }
    folder.write("cut.npy", &array.file()[..array.file().len() - 1]);
    let cut = NpyArray::open(&folder.path().join("cut.npy"), NpyType::I32, &[3, 2]);
    assert!(cut.unwrap().is_none());
}
