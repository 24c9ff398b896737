"""The alternatives, each as its own documentation recommends, delivering the same tensors as this package.

    task.py the output of all contenders, and the choice of masks
    pixels.py               how those without run lengths make pixels: pycocotools and OpenCV
    ours.py                 sa1b.Loader, and sa1b.Stream in a DataLoader
    webdataset_tars.py      webdataset over shards of jpg and json
    extracted_files.py      a map-style Dataset over folders of jpg and json; plain, and tuned further
    mosaic_shards.py        MosaicML Streaming over MDS shards
    litdata_chunks.py       litData over its chunks
    limits.py reading, decoding, clearing memory: limits of every loader
    contenders.py           the list of them
    program.py              the process that one contender is measured in

A contender is a module, or a part of one, with

    convert(pairs, folder)                          its files, by its own writer, from the same bytes
    batches(place, task, workers, start, endless)   its batches; from `start` of an epoch (0 to 1) on, in its
                                                    own way; `endless` where only the pace counts

Install two of the other loaders with `pip install --no-deps -r benchmarks/peers/requirements.txt`: their
declared dependencies would replace torch and numpy.
"""
