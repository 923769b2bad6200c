{{/* The container of the storage server, the same in all modes but for where it listens and where it stores. */}}
{{- define "slotstream.server" -}}
name: slotstream
image: {{ include "slotstream.image" (list .Values.image .) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - serve
  {{- if eq .Values.mode "deployment" }}
  # The catalogue's URL stands in the Secret: SLOTSTREAM_SERVE_CATALOGUE.
  - --store={{ .Values.deployment.store }}
  - --scratch=/scratch
  {{- else }}
  - --data=/data
  {{- end }}
  {{- if eq .Values.mode "sidecar" }}
  - --listen=unix:/run/slotstream/server.sock
  {{- end }}
  {{- if or (ne .Values.mode "sidecar") .Values.sidecar.listenTcp }}
  - --listen=0.0.0.0:50151
  {{- end }}
  - --metrics=0.0.0.0:9464
  - --probes=0.0.0.0:9465
  - --log-format=json
  - --tokens=/tokens/tokens.toml
  {{- if include "slotstream.sharedMemory" . }}
  # NIXL from this pod's engine alone, where the kernel lets the server read its memory; else gRPC, and the log says why.
  - --transport=shared
  {{- else }}
  # NIXL asks for more than a pod has, and trusts senders further: docs/kubernetes.md.
  - --transport=grpc
  {{- end }}
  - --drain-s={{ .Values.server.drainSeconds }}
  - --free-bytes-min={{ int64 .Values.server.freeBytesMin }}
  - --ingest-bytes-max={{ int64 .Values.server.ingestBytesMax }}
  {{- if gt (int .Values.server.workers) 1 }}
  - --workers={{ .Values.server.workers }}
  {{- end }}
  {{- if include "slotstream.tls" . }}
  - --tls-cert=/tls/tls.crt
  - --tls-key=/tls/tls.key
  {{- if .Values.tls.clientCA }}
  - --tls-client-ca=/tls/ca.crt
  {{- end }}
  {{- end }}
  {{- if .Values.retention.enabled }}
  - --retention=/retention/retention.toml
  {{- end }}
  {{- with .Values.server.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if eq .Values.mode "deployment" }}
envFrom:
  - secretRef: {name: {{ .Values.deployment.secretName }}}
{{- end }}
{{- with .Values.server.extraEnv }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  {{- if or (ne .Values.mode "sidecar") .Values.sidecar.listenTcp }}
  - name: grpc
    containerPort: 50151
  {{- end }}
  - name: metrics
    containerPort: 9464
  - name: probes
    containerPort: 9465
# Half an hour: a start after a crash looks at every file before it answers.
startupProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 360
{{- if ne .Values.mode "sidecar" }}
# Not ready while the server drains, and while its data directory is gone or does not answer. A full disk stays ready.
# (Not in the sidecar: the pod would not be ready then, and an engine goes on serving text without its storage.)
readinessProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
# Fails when the event loop or a thread hangs, and never for a disk: a restart does not bring that back.
livenessProbe:
  httpGet: {path: /livez, port: probes}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
  # What hangs does not drain.
  terminationGracePeriodSeconds: 15
resources:
  {{- toYaml .Values.server.resources | nindent 2 }}
securityContext:
  {{- include "slotstream.containerSecurityContext" . | nindent 2 }}
  readOnlyRootFilesystem: true
volumeMounts:
  {{- if eq .Values.mode "deployment" }}
  - {name: scratch, mountPath: /scratch}
  {{- else }}
  - {name: data, mountPath: /data}
  {{- end }}
  # The directory and not its files (subPath): only that follows when the Secret changes.
  - {name: tokens, mountPath: /tokens, readOnly: true}
  # With --workers the processes speak over a socket here.
  - {name: tmp, mountPath: /tmp}
  {{- if eq .Values.mode "sidecar" }}
  - {name: socket, mountPath: /run/slotstream}
  {{- end }}
  {{- if include "slotstream.tls" . }}
  - {name: tls, mountPath: /tls, readOnly: true}
  {{- end }}
  {{- if .Values.retention.enabled }}
  - {name: retention, mountPath: /retention, readOnly: true}
  {{- end }}
  {{- with .Values.server.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Not empty where the server speaks TLS: it needs a TCP address for that. */}}
{{- define "slotstream.tls" -}}
{{- if and .Values.tls.enabled (or (ne .Values.mode "sidecar") .Values.sidecar.listenTcp) -}}true{{- end -}}
{{- end -}}

{{/* Not empty where the server reads the engine's memory. */}}
{{- define "slotstream.sharedMemory" -}}
{{- if and (eq .Values.mode "sidecar") .Values.sidecar.sharedMemory -}}true{{- end -}}
{{- end -}}

{{- define "slotstream.containerSecurityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The volumes of that container, but for a claim's. */}}
{{- define "slotstream.volumes" -}}
- name: tokens
  secret:
    secretName: {{ .Values.tokens.secretName }}
    # fsGroup makes this 0440, and the server refuses plain tokens that its group may read: keep digests, as
    # `slotstream token` prints them.
    defaultMode: 0400
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if eq .Values.mode "sidecar" }}
# Only the engine and the server mount it.
- name: socket
  emptyDir: {sizeLimit: 1Mi}
{{- end }}
{{- if eq .Values.mode "deployment" }}
# What is arriving; emptied at each start.
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.deployment.scratchSize }}}
{{- else if eq .Values.persistence "none" }}
- name: data
  emptyDir: {sizeLimit: {{ .Values.storage.size }}}
{{- end }}
{{- if include "slotstream.tls" . }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secretName }}
    defaultMode: 0400
{{- end }}
{{- if .Values.retention.enabled }}
- name: retention
  configMap:
    name: {{ include "slotstream.fullname" . }}-retention
{{- end }}
{{- with .Values.server.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
