//! Invalid manifests with valid checksums.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Returns the JSON of a manifest.
fn value() -> Value {
    let temp = scratch();
    let folder = temp.path();
    let text = fs::read(saved(folder).path().join("manifest.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Returns a manifest with a valid checksum.
fn with_checksum(mut value: Value) -> Vec<u8> {
    value.as_object_mut().unwrap().remove("checksum");
    let text = value.to_string();
    checksummed::append_checksum(text[..text.len() - 1].to_string() + ",\n")
}

#[test]
fn other_versions_are_named() {
    Manifest::parse(&with_checksum(value())).unwrap();
    let mut other = value();
    other["version"] = json!(2);
    other["tensors"] = json!("something else");
    let text = Manifest::parse(&with_checksum(other))
        .unwrap_err()
        .to_string();
    let wanted = "manifest.json has version 2 of the format; this program reads version 1";
    assert_eq!(text, wanted);
    let mut other = value();
    other["format"] = json!("picture");
    let text = Manifest::parse(&with_checksum(other))
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("unknown format 'picture': expected 'burn-megatron checkpoint'"),
        "{text}"
    );
}

#[test]
fn what_makes_no_sense_is_named() {
    let huge = u64::MAX;
    let cases: Vec<(&str, Value, &str)> = vec![
        ("/files/0/name", json!("../x"), "invalid file name"),
        (
            "/files/0/name",
            json!("part-00001.safetensors"),
            "files are not in order",
        ),
        ("/tensors/0/key", json!("z"), "tensors are not in order"),
        ("/objects/1/key", json!("a"), "objects are not in order"),
        ("/files/0/size", json!(huge), "its entries end at"),
        ("/files/0/header", json!(huge), "begins at byte"),
        (
            "/tensors/0/pieces/0/file",
            json!(2),
            "is in file 2, but there are only 2",
        ),
        ("/tensors/0/pieces/0/file", json!(1), "begins at byte"),
        ("/tensors/0/pieces/0/begin", json!(huge), "begins at byte"),
        ("/objects/0/size", json!(huge), "checksums"),
        ("/objects/0/checksums", json!([]), "checksums"),
        ("/tensors/0/pieces/0/checksums", json!([]), "0 checksums"),
        (
            "/tensors/0/pieces/0/checksums/0",
            json!("x"),
            "invalid checksum",
        ),
        (
            "/tensors/0/pieces/0/slice/offset",
            json!([0, 3]),
            "is out of bounds",
        ),
        (
            "/tensors/0/pieces/0/slice/offset",
            json!([huge, huge]),
            "is out of bounds",
        ),
        (
            "/tensors/0/pieces/0/slice/shape",
            json!([3]),
            "is out of bounds",
        ),
        (
            "/tensors/0/pieces/0/slice/shape",
            json!([3, 0]),
            "is an empty shard",
        ),
        (
            "/tensors/0/pieces/0/slice/shape",
            json!([3, 3]),
            "saved twice",
        ),
        (
            "/tensors/0/pieces/0/slice/shape",
            json!([3, 1]),
            "was not saved",
        ),
        ("/tensors/0/shape", json!([huge, huge]), "overflows 64 bits"),
        ("/tensors/0/shape", json!([0, huge]), "is out of bounds"),
        ("/tensors/0/shape", json!(vec![1; 33]), "33 dims"),
        ("/tensors/0/dtype", json!("f64"), "begins at byte"),
        ("/tensors/0/dtype", json!("f8"), "unknown variant"),
        ("/tensors/0/pieces", json!([]), "was not saved"),
        ("/about/step", json!(-1), "invalid value"),
    ];
    for (place, new, wanted) in cases {
        let mut changed = value();
        *changed.pointer_mut(place).unwrap() = new.clone();
        let text = Manifest::parse(&with_checksum(changed))
            .unwrap_err()
            .to_string();
        assert!(text.contains(wanted), "{place} {new}: {text}");
    }
    let mut more = value();
    more["more"] = json!(1);
    Manifest::parse(&with_checksum(more)).unwrap_err();
}

#[test]
fn a_hundred_thousand_pieces_take_a_moment() {
    let tensors = (0..1000).map(|number| TensorEntry {
        key: format!("model/blocks.{number:04}.mlp.up.weight"),
        dtype: ElementType::F32,
        shape: vec![100, 64],
        shards: (0..100)
            .map(|row| ShardEntry {
                file: 0,
                begin: 64 + 256 * (number * 100 + row as u64),
                slice: slice(&[row, 0], &[1, 64]),
                checksums: vec![Checksum::of(b"")],
            })
            .collect(),
    });
    let manifest = Manifest {
        metadata: metadata(1),
        files: vec![FileEntry {
            name: "part".into(),
            size: 64 + 256 * 100_000,
            header: 64,
            checksum: Checksum::of(b""),
        }],
        tensors: tensors.collect(),
        objects: vec![],
    };
    // A quadratic algorithm would take hours here.
    let bytes = manifest.to_bytes();
    assert_eq!(Manifest::parse(&bytes).unwrap(), manifest);
}

/// Replaces the value at a path of a JSON value.
fn change(value: &mut Value, path: &[usize], new: &Value) {
    let Some((at, rest)) = path.split_first() else {
        *value = new.clone();
        return;
    };
    let inner = match value {
        Value::Array(items) if !items.is_empty() => {
            let at = at % items.len();
            items.get_mut(at)
        }
        Value::Object(items) if !items.is_empty() => {
            let at = at % items.len();
            items.values_mut().nth(at)
        }
        other => {
            *other = new.clone();
            return;
        }
    };
    if let Some(inner) = inner {
        change(inner, rest, new);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any manifest with a valid checksum is parsed or refused, without a panic.
    #[test]
    fn no_manifest_ends_the_program(
        changes in prop::collection::vec(
            (prop::collection::vec(0usize..100, 0..7), prop::sample::select(vec![
                json!(0), json!(1), json!(3), json!(u64::MAX), json!(i64::MAX), json!(-1), json!(1u64 << 40),
                json!(0.5), json!(null), json!("f64"), json!(""), json!([]), json!([0, 0]), json!([3, 2]),
                json!([1u64 << 40, 1u64 << 40]), json!({}),
            ])), 1..4),
    ) {
        let mut value = VALUE.with(Clone::clone);
        for (path, new) in &changes {
            // The root itself is not replaced.
            let path = [&[path.len()][..], path].concat();
            change(&mut value, &path, new);
        }
        if let Ok(manifest) = Manifest::parse(&with_checksum(value)) {
            prop_assert_eq!(Manifest::parse(&manifest.to_bytes()).unwrap(), manifest);
        }
    }

    #[test]
    fn no_bytes_end_the_program(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        Manifest::parse(&noise).unwrap_err();
        let text = checksummed::append_checksum(String::from_utf8_lossy(&noise).into_owned());
        Manifest::parse(&text).unwrap_err();
    }
}

thread_local! {
    static VALUE: Value = value();
}
