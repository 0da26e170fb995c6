//! Tests of damaged files and inconsistent parts.

use insta::assert_snapshot;

use super::*;

#[test]
fn each_flipped_byte_of_the_data_is_found() {
    let temp = scratch();
    let folder = temp.path();
    let saved = saved(folder);
    for name in ["part-00000.safetensors", "part-00001.safetensors"] {
        let path = saved.path().join(name);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            fs::write(&path, &changed).unwrap();
            let again = Checkpoint::open(folder).unwrap();
            let text = again.verify(&mut |_| {}).unwrap_err().to_string();
            assert!(
                text.contains(name) && text.contains("has changed"),
                "byte {at}: {text}"
            );
        }
        fs::write(&path, &bytes).unwrap();
    }
    assert_small(&Checkpoint::open(folder).unwrap());
}

#[test]
fn each_flipped_byte_of_the_manifest_is_found() {
    let temp = scratch();
    let folder = temp.path();
    let saved = saved(folder);
    let path = saved.path().join("manifest.json");
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        let text = Manifest::parse(&changed).unwrap_err().to_string();
        assert!(text.starts_with("manifest.json: "), "{text}");
    }
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let text = Checkpoint::open(folder).unwrap_err().to_string();
    assert!(
        text.contains(path.to_str().unwrap()) && text.contains("cut off"),
        "{text}"
    );
}

#[test]
fn a_file_of_another_size_is_not_opened() {
    let temp = scratch();
    let folder = temp.path();
    let saved = saved(folder);
    let path = saved.path().join("part-00001.safetensors");
    let bytes = fs::read(&path).unwrap();
    for changed in [&bytes[..bytes.len() - 1], &[&bytes[..], b"x"].concat()] {
        fs::write(&path, changed).unwrap();
        let text = Checkpoint::open(folder).unwrap_err().to_string();
        let sizes = format!(
            "the file has {} bytes, expected {}",
            changed.len(),
            bytes.len()
        );
        assert!(
            text.contains("part-00001") && text.contains(&sizes),
            "{text}"
        );
    }
    fs::remove_file(&path).unwrap();
    let text = Checkpoint::open(folder).unwrap_err().to_string();
    assert!(
        text.contains("cannot open") && text.contains("part-00001"),
        "{text}"
    );
}

#[test]
fn a_file_that_is_cut_while_it_is_open_ends_nothing() {
    let temp = scratch();
    let folder = temp.path();
    let cut = |saved: &Checkpoint| {
        let path = saved.path().join("part-00001.safetensors");
        fs::OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(0)
            .unwrap();
    };
    let all = TensorSlice::whole(&[3, 4]);
    let before = saved(&folder.join("before"));
    cut(&before);
    let mapped = saved(&folder.join("after"));
    mapped.read("model/a.weight", &all).unwrap();
    cut(&mapped);
    for saved in [before, mapped] {
        let text = saved.read("model/a.weight", &all).unwrap_err().to_string();
        assert!(text.contains("the file has 0 bytes"), "{text}");
        saved.verify(&mut |_| {}).unwrap_err();
        // Other files are not affected.
        assert_eq!(saved.read("model/b", &slice(&[1], &[2])).unwrap().len(), 4);
    }
}

#[test]
fn what_is_not_there_is_named() {
    let temp = scratch();
    let folder = temp.path();
    let saved = saved(folder);
    let text = saved
        .read("model/c", &slice(&[0], &[1]))
        .unwrap_err()
        .to_string();
    assert!(text.contains("has no model/c"), "{text}");
    let text = saved
        .read("model/b", &slice(&[4], &[2]))
        .unwrap_err()
        .to_string();
    assert!(text.contains("[5]") && text.contains("[4..6]"), "{text}");
    saved
        .read("model/b", &slice(&[usize::MAX], &[2]))
        .unwrap_err();
    saved.read("model/b", &slice(&[0, 0], &[1, 1])).unwrap_err();
    let text = saved.object("rank 9").unwrap_err().to_string();
    assert!(text.contains("has no rank 9"), "{text}");
}

/// Returns the error of publishing these parts. Afterwards the folder is empty except for the lock.
fn refused(tensors: &[TestTensor], parts: &[Vec<(usize, TensorSlice)>]) -> CheckpointError {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let pending = folder.begin(1).unwrap();
    write(&pending, tensors, parts);
    let error = pending
        .publish(parts.len(), &metadata(1), &Retention::default(), WAIT)
        .unwrap_err();
    // Only the lock remains.
    assert_eq!(fs::read_dir(path).unwrap().count(), 1);
    error
}

#[test]
fn parts_that_make_no_whole_are_not_published() {
    let (tensors, mut parts) = small();
    parts[1][0].1 = slice(&[0, 1], &[3, 3]);
    let text = refused(&tensors, &parts).to_string();
    let twice =
        "model/a.weight: the element [0, 1] was saved twice, in [0..3, 0..2] and in [0..3, 1..4]";
    assert_eq!(text, twice);
    parts[1][0].1 = slice(&[0, 3], &[3, 1]);
    let text = refused(&tensors, &parts).to_string();
    assert_snapshot!(text, @"model/a.weight: the element [0, 2] was not saved");
    parts[1].clear();
    assert!(matches!(
        refused(&tensors, &parts),
        CheckpointError::Gap { .. }
    ));
    let (mut tensors, parts) = small();
    let mut other = tensors[0].clone();
    other.meta.dtype = ElementType::I32;
    tensors.push(other);
    let parts = [parts[0].clone(), vec![(2, parts[1][0].1.clone())]];
    let text = refused(&tensors, &parts).to_string();
    assert_snapshot!(text, @"model/a.weight is f32 [3, 4] on one rank and i32 [3, 4] on another");
}

#[test]
fn pieces_that_cannot_be_are_refused() {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let tensor = |shape: &[usize]| TensorMeta {
        key: "model/x".into(),
        dtype: ElementType::F32,
        shape: shape.to_vec(),
    };
    let shard = |shape: &[usize], slice: TensorSlice| TensorShard {
        tensor: tensor(shape),
        slice,
    };
    let half = shard(&[4], slice(&[0], &[2]));
    let object = |key: &str| (key.to_string(), vec![]);
    let cases = [
        (
            vec![shard(&[4], slice(&[3], &[2]))],
            vec![],
            "[3..5] of model/x is out of bounds",
        ),
        (
            vec![shard(&[1 << 40, 1 << 40], slice(&[0, 0], &[1, 1]))],
            vec![],
            "overflows 64 bits",
        ),
        (
            vec![half.clone(), half.clone()],
            vec![],
            "model/x [0..2] was saved twice",
        ),
        (
            vec![],
            vec![object("a"), object("a")],
            "object/a was saved twice",
        ),
        (
            vec![half],
            vec![],
            "has 8 bytes in [0..2], but 3 were given",
        ),
    ];
    for (shards, objects, wanted) in cases {
        let pending = folder.begin(1).unwrap();
        let error = pending
            .write_part(0, &shards, &objects, |_| Ok(vec![0; 3]))
            .unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
        // The publisher fails without waiting for its deadline.
        let error = pending
            .publish(2, &metadata(1), &Retention::default(), WAIT)
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("rank 0 could not") && text.contains(wanted),
            "{text}"
        );
    }
    let pending = folder.begin(1).unwrap();
    let twice = [("a".to_string(), vec![1])];
    for rank in 0..2 {
        pending
            .write_part(rank, &[], &twice, |_| Ok(vec![]))
            .unwrap();
    }
    let error = pending
        .publish(2, &metadata(1), &Retention::default(), WAIT)
        .unwrap_err();
    assert_snapshot!(error, @"a was saved twice");
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let (tensors, parts) = small();
    let pending = folder.begin(1).unwrap();
    write(&pending, &tensors, &parts[..1]);
    let wait = Duration::from_millis(30);
    let error = pending
        .publish(3, &metadata(1), &Retention::default(), wait)
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("from rank 1, 2 after"), "{text}");
    let pending = folder.begin(1).unwrap();
    write(&pending, &tensors, &parts[..1]);
    let other = folder.join(pending.name()).unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        other.fail_part(1, "the disk is full");
    });
    let error = pending
        .publish(2, &metadata(1), &Retention::default(), WAIT)
        .unwrap_err();
    late.join().unwrap();
    let text = error.to_string();
    assert!(
        text.contains("rank 1 could not") && text.contains("the disk is full"),
        "{text}"
    );
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let temp = scratch();
    let path = temp.path();
    fs::write(path.join("file"), "").unwrap();
    let error = CheckpointFolder::create(path.join("file/checkpoints")).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("cannot create the folder") && text.contains("/file: "),
        "{text}"
    );
    CheckpointFolder::open(path.join("nowhere")).unwrap_err();
    // A folder of Linux in which not even root can create files.
    if Path::new("/proc/self/task").is_dir() {
        let folder = CheckpointFolder::open("/proc/self/task").unwrap();
        let text = folder.begin(1).unwrap_err().to_string();
        assert!(
            text.contains("cannot create") && text.contains("task/lock"),
            "{text}"
        );
    }
}
